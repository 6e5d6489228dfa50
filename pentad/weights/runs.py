"""Where the bytes of a block lie in a file that holds the whole tensor. Neither torch nor numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

CHUNK_BYTES = 8 << 20
"""What is written in one go."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Where bytes lie in a file: in runs of `length`, the first at `start`, the others at `steps`
    from it: (number, distance), outermost first."""

    start: int
    length: int
    steps: tuple[tuple[int, int], ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.length * math.prod(number for number, _ in self.steps)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """(offset in the file, start and stop in the bytes) of what is written in one go."""
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
    """Where the bytes of a box lie in the file, whose tensor begins at `start`."""
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
