"""Spans: runs of queries of one sequence each, over packed rows or a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NO_WINDOW = 1 << 30
"""Window that kernels get if there is none: longer than any sequence."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Runs of queries of one sequence each, and the locations of their keys and values.

    Position p of span s has place `table[s, p // piece] * stride + p % piece`. A packed batch has
    one piece per sequence, a paged cache one per block.
    """

    first_S: np.ndarray
    """Flat index of each span's first query."""
    start_S: np.ndarray
    """Position of the first query in its sequence."""
    count_S: np.ndarray
    table_SW: np.ndarray
    piece: int
    stride: int

    def places(self, span_N: np.ndarray, first: int, num: int) -> np.ndarray:
        """Places [N, num] of positions `first` and later; undefined after the end of a sequence."""
        end_N1 = (self.start_S + self.count_S)[span_N, None]
        position = np.minimum(first + np.arange(num), end_N1 - 1)
        piece: np.ndarray = self.table_SW[span_N[:, None], position // self.piece].astype(np.int64)
        return piece * self.stride + position % self.piece


def packed_spans(lengths: Sequence[int]) -> Spans:
    count_S = np.asarray(lengths, np.int64)
    first_S = np.cumsum(count_S) - count_S
    return Spans(first_S, np.zeros_like(count_S), count_S, first_S[:, None], 1 << 30, 1)
