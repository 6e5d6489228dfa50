"""Pentad: reinforcement-learning post-training of language models, PyTorch-native.

`train`, `sft`, `dpo` and `reward_model` are the commands of these names as functions, `load` opens
a model to sample from and to judge. They are imported when they are first used: importing pentad
takes no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pentad.api.model import load
    from pentad.api.runs import dpo, reward_model, sft, train

__version__ = "0.1.0"
__all__ = ["__version__", "dpo", "load", "reward_model", "sft", "train"]
RUNS = ("train", "sft", "dpo", "reward_model")
PLACES = {"load": "pentad.api.model", **dict.fromkeys(RUNS, "pentad.api.runs")}


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module 'pentad' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(PLACES[name]), name)
