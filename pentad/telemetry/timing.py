"""Where the time of a step goes: exclusive phases that sum to its wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OTHER = "other"


class PhaseTimer:
    """Runs from its making. A phase inside another stops the outer one's clock; time in no phase
    is `other`; so the parts always sum to the whole. For one thread of control: phases that overlap
    in time (two tasks of an event loop) need a timer each.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.start = clock()
        self._mark = self.start
        self._open: list[str] = []
        self._totals: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._book()
        self._open.append(name)
        depth = len(self._open)
        try:
            yield
        finally:
            self._book()
            assert len(self._open) == depth, f"phase {name} ended while {self._open[-1]} was open"
            self._open.pop()

    def phases_ms(self) -> dict[str, float]:
        """Milliseconds by phase until now, in order of first appearance, `other` last."""
        self._book()
        other = self._totals.get(OTHER, 0.0)
        named = {name: 1e3 * t for name, t in self._totals.items() if name != OTHER}
        return {**named, OTHER: 1e3 * other}

    def _book(self) -> None:
        """Gives the time since the last mark to the innermost open phase."""
        now = self.clock()
        name = self._open[-1] if self._open else OTHER
        self._totals[name] = self._totals.get(name, 0.0) + now - self._mark
        self._mark = now
