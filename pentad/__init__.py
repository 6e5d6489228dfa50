"""Pentad: reinforcement-learning post-training of language models, PyTorch-native."""

__version__ = "0.1.0"
