"""Rows that are learned from as they are: an endless sequence, in a seeded order of each epoch.

What an ordinal stands for follows from the data, the settings and the ordinal alone: neither the
number of ranks nor where a run was interrupted has a say.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from pentad.core.types import Row
from pentad.data.render import DataSettings
from pentad.data.shuffle import epoch_order
from pentad.data.stamp import check_same_data


class Examples(ABC):
    def __init__(self, settings: DataSettings) -> None:
        self.settings = settings
        self.warnings: set[str] = set()
        self._order = lru_cache(maxsize=2)(self._make_order)

    @abstractmethod
    def __len__(self) -> int:
        """Examples an epoch."""

    @property
    @abstractmethod
    def max_row_tokens(self) -> int:
        """Of the longest row."""

    @abstractmethod
    def example(self, index: int) -> list[Row]:
        """The rows of an example, by its place in the data."""

    @abstractmethod
    def summary(self) -> str:
        """What was read, for people."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that decides which example an ordinal is, as JSON values."""

    def batch(self, step: int, size: int) -> list[Row]:
        """The rows of one step: consecutive ordinals, so any step can be found again."""
        ordinals = range(step * size, (step + 1) * size)
        return [row for ordinal in ordinals for row in self.example(self.index(ordinal))]

    def index(self, ordinal: int) -> int:
        """The place in the data of an ordinal of the endless, per epoch shuffled sequence."""
        epoch, position = divmod(ordinal, len(self))
        return int(self._order(epoch)[position]) if self.settings.shuffle else position

    def steps_per_epoch(self, size: int) -> int:
        return math.ceil(len(self) / size)

    def check_state(self, saved: Mapping[str, Any]) -> None:
        """UserError if an ordinal would now be another example."""
        where = f"{self.settings.columns.key}.path = {self.settings.path}"
        check_same_data(where, saved, self.state())

    def _make_order(self, epoch: int) -> np.ndarray:
        return epoch_order(len(self), self.settings.seed, epoch)
