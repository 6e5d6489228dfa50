"""Rows of a decode step whose first places are in the same blocks, as tiles for the kernel.

Answers of one prompt are neighbours in a step. Whether their shared places are read together is
decided only here, by the block table; blocks are equal only if all tokens up to their ends are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pentad.infer.sequence import Table

MIN_ROWS = 4
"""Smallest group that is read together."""
MIN_TOKENS = 256
MIN_TOKENS_8_BITS = 1024
"""Shortest shared beginning that is read together, with a cache in 16 and in 8 bits. Below, the
second kernel costs more than the reads save (`benchmarks/shared_prompts_gpu.py`)."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Tile i: `counts[i]` rows from `firsts[i]` on share `shared[firsts[i]]` places."""

    shared: np.ndarray
    """Shared places of each row; 0: in no tile."""
    firsts: np.ndarray
    counts: np.ndarray

    @property
    def num_saved(self) -> int:
        """Places that are not read again in a step."""
        return int(((self.counts - 1) * self.shared[self.firsts]).sum())


class Grouping:
    """Tiles of successive steps, and how many places they read."""

    def __init__(self, table: Table, max_rows: int, *, is_small: bool) -> None:
        """`max_rows`: most rows of a tile; `is_small`: whether the cache has 8 bits."""
        self.table = table
        self.max_rows = max_rows
        self.min_tokens = MIN_TOKENS_8_BITS if is_small else MIN_TOKENS
        self.num_places = 0
        """Places that rows attended to, in all steps."""
        self.num_saved = 0
        """Those of them that were read with another row's."""
        self.known: tuple[np.ndarray, np.ndarray, RowTiles | None] | None = None

    @property
    def saved_share(self) -> float:
        return self.num_saved / max(1, self.num_places)

    def tiles(self, rows: np.ndarray, lengths_KN: np.ndarray) -> RowTiles | None:
        """Returns the tiles of K steps, None for steps without. Shared blocks never change while
        the same sequences run."""
        table, seats = self.table, self.table.num_seated[rows]
        is_known = self.known is not None and np.array_equal(self.known[0], rows)
        if self.known is None or not (is_known and np.array_equal(self.known[1], seats)):
            size = table.block_size
            num_full = (lengths_KN[0] - 1) // size
            sizes = (size, self.min_tokens, self.max_rows)
            self.known = rows, seats, row_tiles(table.blocks[rows], num_full, *sizes)
        found = self.known[2]
        self.num_places += int(lengths_KN.sum())
        self.num_saved += 0 if found is None else len(lengths_KN) * found.num_saved
        return found


def max_tiles(num_rows: int) -> int:
    return num_rows // MIN_ROWS


def row_tiles(
    blocks: np.ndarray, num_full: np.ndarray, block_size: int, min_tokens: int, max_rows: int
) -> RowTiles | None:
    """Returns tiles of at most `max_rows` rows; None if no group is worth it. `blocks`: the block
    table; `num_full`: for each row its blocks before the one that is written."""
    num_rows = len(blocks)
    least = -(-min_tokens // block_size)
    if num_rows < MIN_ROWS or num_full.max() < least:
        return None
    if not (blocks[1:, least - 1] == blocks[:-1, least - 1]).any():
        return None
    equal = num_equal(blocks, num_full)
    equal[equal < least] = 0
    # A group ends where two rows share less than one of them shares with its other neighbour.
    around = np.maximum(np.append(0, equal[:-1]), np.append(equal[1:], 0))
    edges = np.flatnonzero((equal == 0) | (equal < around)) + 1
    starts, ends = np.append(0, edges), np.append(edges, num_rows)
    shared = np.zeros(num_rows, np.int64)
    firsts: list[int] = []
    counts: list[int] = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        num_tiles = -(-(end - start) // max_rows)
        if end - start < MIN_ROWS or len(firsts) + num_tiles > max_tiles(num_rows):
            continue
        shared[start:end] = block_size * equal[start : end - 1].min()
        bounds = np.linspace(start, end, num_tiles + 1).astype(np.int64)
        firsts += bounds[:-1].tolist()
        counts += np.diff(bounds).tolist()
    if not firsts:
        return None
    return RowTiles(shared, np.array(firsts, np.int64), np.array(counts, np.int64))


def num_equal(blocks: np.ndarray, num_full: np.ndarray) -> np.ndarray:
    """Returns for each pair of neighbouring rows the number of their equal first full blocks."""
    width = int(num_full.max())
    differ = np.ones((len(blocks) - 1, width + 1), bool)
    np.not_equal(blocks[1:, :width], blocks[:-1, :width], out=differ[:, :width])
    first = differ.argmax(axis=1)
    equal: np.ndarray = np.minimum(first, np.minimum(num_full[1:], num_full[:-1]))
    return equal
