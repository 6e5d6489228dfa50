"""Byte ranges of a block in a file that holds the whole tensor. Imports neither torch nor numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

CHUNK_BYTES = 8 << 20
"""Maximum number of bytes per write."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte ranges in a file: runs of `length` bytes, the first at `start`, the others at multiples
    of `steps`: (number, stride), outermost first."""

    start: int
    length: int
    steps: tuple[tuple[int, int], ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.length * math.prod(number for number, _ in self.steps)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """(offset in the file, start and stop in the block's bytes) of each contiguous write."""
        at = 0
        shifts = (range(0, number * distance, distance) for number, distance in self.steps)
        for found in product(*shifts):
            offset = self.start + sum(found)
            for start in range(0, self.length, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, self.length)
                yield offset + start, at + start, at + stop
            at += self.length


def runs_of(
    shape: Sequence[int], box: Sequence[tuple[int, int]], item_bytes: int, start: int
) -> Runs:
    """The byte ranges of a box in the file; the tensor's data begin at `start`."""
    steps: list[tuple[int, int]] = []
    length, row_bytes, is_one_run = item_bytes, item_bytes, True
    for size, (low, high) in reversed(list(zip(shape, box, strict=True))):
        start += low * row_bytes
        if is_one_run:
            length = (high - low) * row_bytes
            is_one_run = high - low == size
        elif high - low > 1:
            steps.append((high - low, row_bytes))
        row_bytes *= size
    return Runs(start, length, tuple(reversed(steps)))
