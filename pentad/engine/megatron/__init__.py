"""Learners on Megatron-Core: the backend `megatron`.

`core.py` is the only file that imports megatron-core; `config.py` translates settings; `model.py`
runs GPTModel over packed rows; `held.py` names its weights by the map and sums its gradients.
Losses, batches, optimizer, tags, checkpoints and publishing are those of the engine.
"""
