"""A clock that counts only the time in which this process could run, not the time it was stopped.

A stopped program (ctrl-Z, SIGSTOP, a frozen container) reads no data. Deadlines on this clock are
extended by that time, so data that arrived meanwhile are read before any deadline passes.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

TICK_S = 0.5
HELD_S = 3.0
"""Interval of checking the clock. A longer gap means that the process was stopped or got no CPU
time, unless it computed meanwhile."""


BUSY_SHARE = 0.5
"""A gap in which the process used at least this share of CPU time does not count: code that holds
the GIL keeps threads from checking the clock."""


class AwakeClock:
    """The clock; a thread checks it continuously to find gaps."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.monotonic = monotonic
        self.stopped_s = 0.0
        self._begin()

    def _begin(self) -> None:
        """Starts the thread, also in a forked child, which has none of its parent's threads."""
        self.lock = threading.RLock()  # a signal handler may call it too
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
"""Seconds of this process, from an arbitrary start."""
os.register_at_fork(after_in_child=awake_s._begin)


class AwakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers use this clock."""

    def time(self) -> float:
        return awake_s()
