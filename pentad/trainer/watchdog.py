"""The watchdog: when nothing moves, it names what is stuck, since when, behind which gate."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pentad.core.errors import RunError
from pentad.trainer.state import RunState

log = logging.getLogger(__name__)


class Watchdog:
    """Warns after `warn_s` without progress, and again each time that long; ends the run after
    `abort_s`. Progress is a change of what was committed, dropped, trained or published."""

    def __init__(
        self,
        state: RunState,
        *,
        warn_s: float,
        abort_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self.warn_s = warn_s
        self.abort_s = abort_s
        self.clock = clock
        self.last_progress: tuple[object, ...] = ()
        self.last_change = clock()
        self.last_warning = clock()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(self.warn_s, 5.0) / 2)
            self.look()

    def look(self) -> None:
        """One look at the counters; raises RunError when the run has stood still too long."""
        now = self.clock()
        progress = self._progress()
        if progress != self.last_progress:
            self.last_progress, self.last_change, self.last_warning = progress, now, now
            return
        stalled_s = now - self.last_change
        if stalled_s >= self.abort_s:
            raise RunError(f"no progress for {stalled_s:.0f} s: {self.report()}")
        if now - self.last_warning >= self.warn_s:
            self.last_warning = now
            log.warning("batch %d stalled for %.0f s: %s", self._batch, stalled_s, self.report())

    def report(self) -> str:
        """What each pump waits for and which groups have not ended."""
        ledger = self.state.ledger
        waits = [f"{pump} waits for {what}" for pump, what in sorted(self.state.waiting.items())]
        running = ledger.gids_in("running")
        if running:
            waits.append(
                f"{len(running)} groups running, oldest gid {running[0]}"
                + (f", newest {running[-1]}" if len(running) > 1 else "")
            )
        return "; ".join(waits) or "no pump waits: a generation or an update is taking this long"

    @property
    def _batch(self) -> int:
        return self.state.budget.trained

    def _progress(self) -> tuple[object, ...]:
        budget, funnel = self.state.budget, self.state.ledger.funnel()
        return (budget.trained, budget.published, funnel)
