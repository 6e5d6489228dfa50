"""An endless sequence over data, in a seeded order of each epoch.

The example of an ordinal depends only on the data, the settings and the ordinal, not on the number
of ranks or on interruptions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from pentad.core.seeds import derive_seed
from pentad.core.types import Row
from pentad.data.render import DataSource
from pentad.data.stamp import check_same_data

TOO_LONG = "too_long"
"""Reason, in counts, for a row dropped because of its length."""


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(size), int64.

    Rows are sorted by splitmix64 of their index. This is pure integer arithmetic without a
    library's random generator, so the order is the same after any upgrade. It is a bijection, so
    there are no ties. https://prng.di.unimi.it/splitmix64.c
    """
    key = np.uint64(derive_seed(seed, "epoch", epoch))
    with np.errstate(over="ignore"):
        z = key + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.argsort(z, kind="stable")


class OrderedData(ABC):
    """Data with an endless sequence of ordinals, shuffled by epoch."""

    def __init__(self, source: DataSource) -> None:
        self.source = source
        self.warnings: set[str] = set()
        self.notes: list[str] = []
        """Notes for the user on the reading of rows."""
        self._order = lru_cache(maxsize=2)(lambda e: epoch_order(len(self), source.seed, e))

    @abstractmethod
    def __len__(self) -> int:
        """Number of prompts or examples per epoch."""

    @abstractmethod
    def summary(self) -> str:
        """A description of the data for the user."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All values that determine the example of an ordinal, as JSON values."""

    def place(self, ordinal: int) -> tuple[int, int]:
        """Epoch, and index in the data."""
        epoch, position = divmod(ordinal, len(self))
        return epoch, int(self._order(epoch)[position]) if self.source.data.shuffle else position

    def steps_per_epoch(self, size: int) -> int:
        """Number of batches that draw every row of an epoch at least once."""
        return math.ceil(len(self) / size)

    def run_warnings(self, size: int) -> list[str]:
        """Warnings before a run with batches of `size`, such as on repeated rows in a batch."""
        if size <= len(self):
            return [*self.warnings]
        where = f"train_dataset.batch_size = {size}"
        rule = f"there are {len(self)} rows, so rows are repeated within a step"
        return [*self.warnings, f"{where}: {rule}"]

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """Raises UserError if ordinals no longer have the examples of the saved state."""
        where = f"{self.source.key}.path = {self.source.path}"
        check_same_data(where, saved, self.state())


class Examples(OrderedData):
    """Data whose rows are trained directly, without sampling."""

    @property
    @abstractmethod
    def max_row_tokens(self) -> int:
        """Length of the longest row."""

    @abstractmethod
    def example(self, index: int) -> list[Row]:
        """The rows of an example, by its index in the data."""

    def batch(self, step: int, size: int) -> list[Row]:
        """The rows of one step, from consecutive ordinals."""
        ordinals = range(step * size, (step + 1) * size)
        return [row for ordinal in ordinals for row in self.example(self.index(ordinal))]

    def index(self, ordinal: int) -> int:
        return self.place(ordinal)[1]
