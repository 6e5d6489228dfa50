"""Runs without an event loop: steps are calls of the learner, one after the other; what is saved
and recorded after each, and how a run ends.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from pentad.core.errors import RunError, Stopped
from pentad.core.types import StepResult
from pentad.rl.bounds import Bounds
from pentad.runtime.calls import RankCalls
from pentad.telemetry.record import MemoryUse, PhaseTimer, StepRecord
from pentad.trainer.crew import Crew, Regroup
from pentad.trainer.learner_thread import Calls
from pentad.trainer.recovery import Check, finish_saves, save_after_failure
from pentad.trainer.run import OpenRun, RunSummary
from pentad.trainer.scheduler import end_when_hung
from pentad.trainer.stopping import StopFlag, cut_short, stop_flag

log = logging.getLogger(__name__)


class PlainRun(ABC):
    def __init__(
        self, calls: Calls, run: OpenRun, crew: Crew, folders: Sequence[str] = ("default",)
    ) -> None:
        self.calls = calls
        self.open = run
        self.crew = crew
        self.savers = {folder: run.saver(calls, folder) for folder in folders}
        self.recover = run.recovery(calls, self.savers)
        self.bounds = Bounds(run.config.guards)
        self.recover.add("stats_logger_info", "bounds", self.bounds)
        self.trained = 0
        """Steps that are in the weights."""

    @abstractmethod
    def train_step(self, step: int, timer: PhaseTimer) -> list[StepResult]:
        """Trains a step, counted from 0; its optimizer steps."""

    @abstractmethod
    def record(self, step: int, timer: PhaseTimer, memory: MemoryUse) -> StepRecord:
        """Of the step that was trained last; what else is kept of it is written here."""

    def before_steps(self) -> None:  # noqa: B027
        """Before the first step of this start."""

    def after_update(self, step: int, timer: PhaseTimer) -> None:  # noqa: B027
        """With the weights of the step in place, before they are saved."""

    def progress(self) -> tuple[int, int]:
        """Steps in the weights, and updates of a further one, after a failure."""
        return self.trained, 0

    def restore(self, check: Check) -> None:
        """Goes on from the newest checkpoint that `check` accepts."""
        checkpoint = self.open.resume(self.recover, check)
        self.trained = 0 if checkpoint is None else checkpoint.step + 1

    def train(self) -> RunSummary:
        with stop_flag() as stop, self._watch_alone():
            self.calls.is_leaving = lambda: bool(stop.reason)
            return self._train(stop)

    def _watch_alone(self) -> AbstractContextManager[None]:
        """Over several ranks their group is watched elsewhere."""
        if not isinstance(self.calls, RankCalls) or self.calls.rank.world > 1:
            return nullcontext()
        run = self.open
        return end_when_hung(run.config.stall_abort_s, run.folder.file("log.txt"))

    def _train(self, stop: StopFlag) -> RunSummary:
        run, recover, savers = self.open, self.recover, list(self.savers.values())
        try:
            self.before_steps()
            for step in range(self.trained, run.num_steps):
                if stop.reason:
                    break
                self._step(step)
            folders = finish_saves(recover, savers, self.trained, stop)
        except (Regroup, Stopped):
            raise
        except KeyboardInterrupt:
            good, next_start = self.savers["default"].good, recover.next_start
            at = None if recover.is_ending else self.trained + 1
            raise cut_short(stop.reason, at, good, next_start) from None
        except Exception:
            save_after_failure(self.calls, recover, savers, stop, *self.progress())
            raise
        stop.check_complete(self.trained, run.num_steps, folders[0], next_start=recover.next_start)
        assert folders[0] is not None, "a complete run has steps"
        return RunSummary(run.folder.path, folders[0], self.trained, run.recorder.evaluations())

    def _step(self, step: int) -> None:
        run, recover, timer = self.open, self.recover, PhaseTimer()
        with timer.phase("train"):
            results = self.train_step(step, timer)
        self.crew.note_step()
        self.trained = step + 1
        for result in results:
            if result.skipped:
                log.warning("step %d: nothing was updated: %s", step + 1, result.reason)
        self.after_update(step, timer)
        with timer.phase("train"):
            sentence = run.go_back(recover, self.bounds, step, self.bounds.past(results))
        with timer.phase("save"):
            for saver in self.savers.values():
                saver.after_step(step)
            recover.after_step(step, is_doubtful=self.bounds.is_doubtful)
        self.record(step, timer, MemoryUse(**self.calls.ask("memory")))
        recover.commit()
        if sentence:
            raise RunError(f"step {self.trained}: {sentence}")
        if self.trained < run.num_steps:
            self.crew.regroup_if_due(recover, step)
