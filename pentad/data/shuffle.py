"""The order of an epoch: a pure function of seed and epoch, the same on every machine."""

from __future__ import annotations

import numpy as np

from pentad.core.seeds import derive_seed


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(size), int64.

    Rows are sorted by splitmix64 of their index. That is integer arithmetic with no library's
    random generator in it, so a resumed run finds its order again after any upgrade; it maps
    different inputs to different values, so there are no ties. https://prng.di.unimi.it/splitmix64.c
    """
    key = np.uint64(derive_seed(seed, "epoch", epoch))
    with np.errstate(over="ignore"):
        z = key + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.argsort(z, kind="stable")
