"""What the pumps share: the ledger, the store, the budget, and a signal that something changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pentad.data.ledger import Ledger
from pentad.data.store import Store
from pentad.trainer.budget import Budget


class Signal:
    """Wakes all who wait whenever the run's state changed. One event loop only."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            await self._event.wait()


@dataclass(slots=True)
class RunState:
    ledger: Ledger
    store: Store
    budget: Budget
    changed: Signal = field(default_factory=Signal)
    stop_reason: str = ""
    """Set from outside (a signal) to end the run after the step in progress."""
    waiting: dict[str, str] = field(default_factory=dict)
    """What each pump waits for just now; the watchdog reads it out."""

    working: list[str] = field(default_factory=list)
    """What is being done just now that may take long by itself."""

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        self.working.append(what)
        try:
            yield
        finally:
            self.working.remove(what)

    def request_stop(self, reason: str) -> None:
        self.stop_reason = self.stop_reason or reason
        self.changed.notify()

    @property
    def is_over(self) -> bool:
        return bool(self.stop_reason) or self.budget.trained >= self.budget.num_batches

    async def wait_for(self, pump: str, what: str, predicate: Callable[[], bool]) -> None:
        """Waits for the predicate or the end of the run, saying meanwhile what for."""
        self.waiting[pump] = what
        await self.changed.until(lambda: predicate() or self.is_over)
        self.waiting.pop(pump, None)
