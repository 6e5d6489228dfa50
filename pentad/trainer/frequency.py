"""When periodic things are due: every so many epochs, steps or seconds, whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Frequency:
    """Any of the three triggers; all None means never."""

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None
    steps_per_epoch: int = 1
    clock: Callable[[], float] = time.monotonic
    last_time: float | None = None

    def is_due(self, step: int) -> bool:
        """Whether it is due after `step` steps are done; asking starts the clock anew if so."""
        now = self.clock()
        if self.last_time is None:
            self.last_time = now
        due = bool(
            (self.steps and step % self.steps == 0)
            or (self.epochs and step % (self.epochs * self.steps_per_epoch) == 0)
            or (self.seconds and now - self.last_time >= self.seconds)
        )
        if due:
            self.last_time = now
        return due

    def state(self) -> dict[str, Any]:
        """For JSON: how long ago the clock was started."""
        since = None if self.last_time is None else self.clock() - self.last_time
        return {"seconds_since": since}

    def restore(self, state: dict[str, Any]) -> None:
        since = state["seconds_since"]
        self.last_time = None if since is None else self.clock() - since
