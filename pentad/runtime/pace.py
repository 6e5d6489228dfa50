"""Finds the straggler of a group: the rank that the others wait for.

Ranks run a step together, so each takes as long as the slowest. They differ in the time spent
waiting for others, which is sampled from the stack of a rank's thread on the host (waits inside a
GPU stream are not seen). The straggler waits least.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Sequence

from pentad.runtime.process import frame_of

log = logging.getLogger(__name__)

SAMPLE_S = 0.02
WAITS = ("torch/distributed/", "pentad/parallel/collectives", "pentad/core/group_values")
"""Files whose functions, if innermost on the stack, wait for other ranks."""
DEPTH = 3
RATIO = 1.5
"""A rank is a straggler if it computes this factor longer than the others' median,"""
STEPS = 3
"""in so many calls of one kind in a row,"""
LEAST_S = 0.1
"""each of at least this many seconds."""


class WaitMeter:
    """Measures by sampling how long a thread waited for other ranks."""

    def __init__(self) -> None:
        self.thread_id: int | None = None
        self.waited_s = 0.0
        self.sampler = threading.Thread(target=self._sample, name="wait meter", daemon=True)

    def watch(self) -> None:
        """Watches the calling thread from now on."""
        self.thread_id = threading.get_ident()
        self.sampler.start()

    def _sample(self) -> None:
        """Samples until that thread ends."""
        while (frame := frame_of(self.thread_id or 0)) is not None:
            for _ in range(DEPTH):
                if frame is None:
                    break
                if any(place in frame.f_code.co_filename for place in WAITS):
                    self.waited_s += SAMPLE_S
                    break
                frame = frame.f_back
            time.sleep(SAMPLE_S)


class Pace:
    """Compares the ranks of a group, separately for each kind of call, because a rank that is slow
    in training may not be slow in a save."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.slow: dict[str, tuple[int, int]] = {}
        """By kind of call: the slow rank of the last calls, and the number of these calls."""

    @property
    def straggler(self) -> int | None:
        """Returns the rank that is currently slow."""
        return next((rank for rank, count in self.slow.values() if count >= STEPS), None)

    def take(self, kind: str, seconds: float, waited: Sequence[float], step: int | None) -> None:
        """Adds a call on all ranks: its duration, and each rank's time waiting for others."""
        if self.world < 2 or seconds < LEAST_S:
            return
        busy = [max(seconds - wait, 0.0) for wait in waited]
        slowest = max(range(self.world), key=busy.__getitem__)
        rest = statistics.median(busy[:slowest] + busy[slowest + 1 :])
        if busy[slowest] < max(RATIO * rest, LEAST_S):
            self.slow.pop(kind, None)
            return
        before, count = self.slow.get(kind, (slowest, 0))
        count = count + 1 if before == slowest else 1
        self.slow[kind] = slowest, count
        if count == STEPS:
            text = (
                "straggler: rank %d of %d, step %s: computes %.2f s of a call (%s) of %.2f s, the "
                "others %.2f s (median), %d such calls in a row"
            )
            at = "?" if step is None else step
            log.warning(text, slowest, self.world, at, busy[slowest], kind, seconds, rest, STEPS)
