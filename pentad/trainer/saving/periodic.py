"""What is saved now and then beside training: when it is due, tried again and waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pentad.runtime.awake import awake_s
from pentad.trainer.learner_client import LearnerClient

MAX_WAIT_STEPS = 32
"""Between two attempts to save while a disk is full; they come after 1, 2, 4, ... steps."""
LAST_WAITS_S = (2.0, 8.0)
"""Between attempts at the end of a run."""
FAILED_S = 10.0
"""How long a run that failed, or that a signal stops, waits for what is being written."""
POLL_S = 0.05


@dataclass(slots=True)
class Frequency:
    """When periodic things are due: every so many epochs, steps or seconds, whichever comes first;
    all None means never."""

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


@dataclass(slots=True, kw_only=True)
class Periodic:
    """At most one is being written. One that fails is reported at once and tried again after 1, 2,
    4, ... steps; training does not stop for it."""

    learner: LearnerClient
    frequency: Frequency
    steps_per_epoch: int
    is_async: bool = False
    """Written in the background; otherwise training waits."""
    last_saved: int = -1
    """The last step that is whole on disk."""
    commit_ms: float | None = None
    """From the copy until it was whole, of the last one that was written in the background."""
    num_failed: int = 0
    """Since the last that succeeded."""
    retry_at: int | None = None
    is_ending: bool = False
    """Whether the steps of the run are over: nothing is tried after a further step."""
    is_cut: Callable[[], bool] | None = None
    """Whether a signal asked not to wait any longer; None: the signal that stops the run does."""
    is_given_up: bool = False
    """Whether the one being written was not waited for."""

    def is_due(self, step: int) -> bool:
        is_due = self.frequency.is_due(step + 1)
        return is_due or (self.retry_at is not None and step >= self.retry_at)

    def wait_for(self, is_done: Callable[[], bool], pause: Callable[[float], Any]) -> bool:
        """Whether it is done. Ranks that are gone and a signal end the waiting after FAILED_S."""
        deadline = awake_s() if self.is_given_up else float("inf")
        while not is_done():
            if self.is_stopped or (self.learner.is_gone):
                deadline = min(deadline, awake_s() + FAILED_S)
            if awake_s() > deadline:
                self.is_given_up = True
                return False
            pause(POLL_S)
        return True

    @property
    def is_stopped(self) -> bool:
        return (self.is_cut or self.learner.is_stopping)()

    def succeeded(self, step: int) -> None:
        self.last_saved, self.num_failed, self.retry_at = step, 0, None

    def failed(self, now: int) -> str:
        """Counts it; what happens next, in words."""
        self.num_failed += 1
        self.retry_at = now + min(2 ** (self.num_failed - 1), MAX_WAIT_STEPS)
        if self.is_ending:
            return "the run is at its end"
        return f"training goes on, saving is tried again after step {self.retry_at + 1}"
