"""Weights as whole-number shares, and an even order of turns.

Without numpy, because config rules and plans use this, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from math import gcd, lcm

MAX_CYCLE = 100_000
"""Maximum number of turns after which the order of environments repeats."""


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the exact (decimal) proportion of the weights."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = reduce(lcm, (one.denominator for one in exact))
    whole = [int(one * scale) for one in exact]
    common = reduce(gcd, whole)
    return tuple(one // common for one in whole)


class Turns:
    """An endless sequence in which part i has `shares[i]` of every `sum(shares)` turns, evenly
    spread: after n turns, its count differs from its share of n by less than one."""

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = tuple(shares)
        self.length = sum(shares)
        # Turn k of a part with s turns is at (2k + 1) / 2s of the cycle, in whole numbers to avoid
        # rounding; among equal positions, the first part comes first.
        whole = lcm(*shares)
        marks = sorted(
            ((2 * k + 1) * (whole // share), part)
            for part, share in enumerate(shares)
            for k in range(share)
        )
        self.parts = [part for _, part in marks]
        seen = [0] * len(shares)
        self.earlier = [0] * self.length
        """For each turn of the cycle: number of earlier turns of the same part."""
        self.places: list[list[int]] = [[] for _ in shares]
        for place, part in enumerate(self.parts):
            self.earlier[place] = seen[part]
            self.places[part].append(place)
            seen[part] += 1

    def at(self, turn: int) -> tuple[int, int]:
        """Returns the part of a turn, and the number of earlier turns of this part."""
        cycle, place = divmod(turn, self.length)
        part = self.parts[place]
        return part, cycle * self.shares[part] + self.earlier[place]

    def until(self, counts: Sequence[int]) -> int:
        """Smallest number of turns after which every part has had at least `counts[part]`."""
        ends = []
        for part, count in enumerate(counts):
            cycles, rest = divmod(count - 1, self.shares[part])
            ends.append(cycles * self.length + self.places[part][rest] + 1)
        return max(ends)
