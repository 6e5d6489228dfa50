"""Periodic saves during training: schedule, retries and waits.

An artifact is staged while the weights are those of its step, then committed, and complete some
time later. `Periodic` is this state machine; exports and checkpoints implement it.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any

from pentad.checkpoint.writer import Pending
from pentad.core.errors import RunError, Transient, UserError
from pentad.runtime.awake import awake_s
from pentad.runtime.learner_client import LearnerClient

log = logging.getLogger(__name__)

MAX_WAIT_STEPS = 32
"""Maximum number of steps between two attempts to save while a disk is full; attempts come after 1,
2, 4, ... steps."""
LAST_WAITS_S = (2.0, 8.0)
"""Pauses between attempts at the end of a run, in seconds."""
FAILED_S = 10.0
"""How long a run that failed or was stopped waits for a write in progress, in seconds."""
POLL_S = 0.05


@dataclass(slots=True)
class Frequency:
    """Condition for periodic work: every N epochs, steps or seconds, whichever comes first; never
    if all are None."""

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None
    steps_per_epoch: int = 1
    clock: Callable[[], float] = time.monotonic
    last_time: float | None = None

    def is_due(self, step: int) -> bool:
        """Returns whether it is due after `step` steps; if so, restarts the clock."""
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
        """Returns the seconds since the clock was started, as JSON values."""
        since = None if self.last_time is None else self.clock() - self.last_time
        return {"seconds_since": since}

    def restore(self, state: dict[str, Any]) -> None:
        since = state["seconds_since"]
        self.last_time = None if since is None else self.clock() - since


@dataclass(slots=True, kw_only=True)
class Periodic(ABC):
    """Writes at most one artifact at a time. A failure is logged at once and retried after 1, 2, 4,
    ... steps; training continues."""

    learner: LearnerClient
    frequency: Frequency
    steps_per_epoch: int
    is_async: bool = False
    """Whether artifacts are written in the background; else training waits."""
    must_wait: bool = False
    """Whether training waits for a write in progress when the next is due; else the next one is
    staged after a later step."""
    staged: tuple[int, Pending] | None = None
    """Step and write of an artifact that is staged and not committed."""
    under_way: tuple[int, Pending] | None = None
    """Step and write of an artifact that is committed and possibly not complete."""
    is_owed: bool = False
    """Whether an artifact became due while another was being written."""
    last_saved: int = -1
    """The last step that is complete on disk."""
    stall_ms: float | None = None
    """How long training waited for the last stage, in ms."""
    commit_ms: float | None = None
    """Time from the last stage until the artifact was complete, in ms."""
    num_failed: int = 0
    """Failed attempts since the last success."""
    error: Exception | None = None
    """The error of the last failed attempt."""
    retry_at: int | None = None
    is_ending: bool = False
    """Whether all steps of the run are done, so there are no retries after further steps."""
    is_cut: Callable[[], bool] | None = None
    """Returns whether a signal requested to stop waiting; None: the signal that stops the run."""
    is_given_up: bool = False
    """Whether the run stopped waiting for the write in progress."""

    # An artifact

    @abstractmethod
    def stage(self, step: int) -> None:
        """Copies the state of `step` on all ranks; the state may change after this returns."""

    @abstractmethod
    def commit(self, step: int) -> Callable[[], dict[str, Any]]:
        """Completes the artifact once the step is recorded, in the background if `is_async`.
        Returns its result, or raises its error."""

    @abstractmethod
    def describe(self, step: int) -> str:
        """Returns the artifact's name for messages."""

    @property
    @abstractmethod
    def good(self) -> str:
        """Describes the complete artifacts on disk."""

    @abstractmethod
    def on_saved(self, step: int, result: dict[str, Any]) -> None:
        """Called when the artifact is complete."""

    @abstractmethod
    def on_failed(self, error: Exception) -> None:
        """Called after a failure was logged; may remove incomplete files."""

    # Steps

    def save_if_due(self, step: int, *, is_doubtful: bool = False) -> None:
        """Saves if due after `step`, whose weights are in place. If the weights are doubtful, the
        save is postponed."""
        self.collect(step)
        is_due = self.frequency.is_due(step + 1) or self.is_owed
        is_due = is_due or (self.retry_at is not None and step >= self.retry_at)
        if is_due and self.must_wait:
            self.collect(step, wait=True)
        self.is_owed = is_due and (is_doubtful or self.under_way is not None)
        if is_due and not self.is_owed:
            self.try_stage(step)

    def try_stage(self, step: int) -> None:
        pending = Pending()
        try:
            self.stage(step)
        except Transient:  # the ranks are lost
            raise
        except (OSError, RunError, UserError) as error:
            self._failed(step, step, error)
        else:
            self.staged, self.stall_ms = (step, pending), 1e3 * pending.seconds

    def commit_staged(self) -> None:
        if self.staged is None:
            return
        (step, pending), self.staged = self.staged, None
        self.under_way = step, pending
        make_whole = self.commit(step)
        if self.is_async:
            threading.Thread(target=pending.settle_by, args=(make_whole,), daemon=True).start()
        else:
            pending.settle_by(make_whole)
        self.collect(step, wait=not self.is_async)

    def collect(self, now: int, *, wait: bool = False) -> None:
        """Collects the outcome of the write in progress. `now`: the latest step of the run."""
        if self.under_way is None:
            return
        step, pending = self.under_way
        if wait:
            self._wait_for(pending)
        if not pending.done():
            return
        self.under_way = None
        try:
            result = pending.result()
        except (OSError, RunError) as error:
            self._failed(step, now, error)
            return
        self.commit_ms = 1e3 * pending.seconds
        self.last_saved, self.num_failed, self.retry_at = step, 0, None
        self.on_saved(step, result)

    def is_saved(self, step: int) -> bool:
        """Returns whether this step is complete on disk; waits for its write in progress."""
        if self.under_way is not None and self.under_way[0] == step:
            self.collect(step, wait=True)
        return self.last_saved == step

    # The end

    def save_now(self, step: int) -> None:
        """Saves the step, whose weights are in place, if no other write is in progress."""
        self.collect(step)
        if self.under_way is None and self.last_saved != step:
            if self.staged is None:
                self.try_stage(step)
            self.commit_staged()

    def finish_step(self, step: int) -> bool:
        """Saves the step with several attempts; returns whether it is complete on disk."""
        self.collect(step, wait=True)
        for wait_s in (0.0, *LAST_WAITS_S):
            if self.last_saved == step or (wait_s and self.is_stopped):
                break
            time.sleep(wait_s)
            self.save_now(step)
            self.collect(step, wait=True)
        return self.last_saved == step

    @property
    def is_stopped(self) -> bool:
        return (self.is_cut or self.learner.is_stopping)()

    def _wait_for(self, pending: Pending) -> None:
        """Waits for the write; for FAILED_S at most if ranks are lost or a signal arrived."""
        deadline = awake_s() if self.is_given_up else float("inf")
        while wait_for([pending], POLL_S).not_done:
            if self.is_stopped or self.learner.is_gone:
                deadline = min(deadline, awake_s() + FAILED_S)
            if awake_s() > deadline:
                self.is_given_up = True
                return

    def _failed(self, step: int, now: int, error: Exception) -> None:
        self.num_failed, self.error = self.num_failed + 1, error
        self.retry_at = now + min(2 ** (self.num_failed - 1), MAX_WAIT_STEPS)
        then = f"training continues, saving is tried again after step {self.retry_at + 1}"
        if self.is_ending:
            then = "the run has ended"
        text = "step %d: %s could not be saved: %s; %s; %s"
        log.warning(text, now + 1, self.describe(step), error, then, self.good)
        self.on_failed(error)
