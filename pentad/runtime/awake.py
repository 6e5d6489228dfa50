"""Time in which this process could run: a clock without the seconds in which it was stopped.

A program that was stopped (ctrl-Z, SIGSTOP, a frozen container) has received nothing meanwhile.
Deadlines on this clock are pushed by as much, and what arrived meanwhile is read before any passes.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

TICK_S = 0.5
HELD_S = 3.0
"""Between two looks at the clock; more means that the process was stopped, or starved of time,
unless it computed meanwhile."""


BUSY_SHARE = 0.5
"""A gap in which the process computed at least so much of the time was none: code that holds the
interpreter lets no thread look at the clock."""


class AwakeClock:
    """A thread looks at it all the time, so that gaps between looks are seen as what they are."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.monotonic = monotonic
        self.stopped_s = 0.0
        self._begin()

    def _begin(self) -> None:
        """Also in a forked child, which has none of its parent's threads."""
        self.lock = threading.RLock()  # a signal's handler may ask too
        self.seen_at = self.monotonic()
        self.used_s = time.process_time()
        self.ticker: threading.Thread | None = None

    def __call__(self) -> float:
        with self.lock:
            if self.ticker is None:
                self.seen_at = self.monotonic()
                ticker = threading.Thread(target=self._tick, name="awake", daemon=True)
                ticker.start()
                self.ticker = ticker
            now, used_s = self.monotonic(), time.process_time()
            gap_s = now - self.seen_at
            if gap_s > HELD_S and used_s - self.used_s < BUSY_SHARE * gap_s:
                self.stopped_s += gap_s
            self.seen_at, self.used_s = now, used_s
            return now - self.stopped_s

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            self()


awake_s = AwakeClock()
"""Seconds of this process, from any beginning."""
os.register_at_fork(after_in_child=awake_s._begin)


class AwakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers count such seconds."""

    def time(self) -> float:
        return awake_s()
