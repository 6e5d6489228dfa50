"""HF exports of a run, during training and at its end.

If asynchronous (`saver.mode`), every rank copies its blocks to host memory while the weights are
those of the step, and a writer process writes them during training: at most one export at a time. A
folder that cannot be written is reported at once and retried after further steps. Complete folders
are kept, unless `saver.keep_last` or `saver.keep_best` is set: then older ones are removed once a
newer one is complete.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentad.checkpoint.writer import failure_in
from pentad.core.errors import RunError
from pentad.core.files import sweep
from pentad.core.machine import GIB
from pentad.telemetry.log import NOTICE
from pentad.trainer.saving.periodic import MAX_WAIT_STEPS, Periodic

log = logging.getLogger(__name__)

FOLDER = re.compile(r"epoch\d+epochstep\d+globalstep(\d+)")


@dataclass(slots=True, kw_only=True)
class Saver(Periodic):
    """Writes `{root}/epoch{E}epochstep{S}globalstep{G}` folders that transformers loads."""

    role: str
    """The learner that is exported: "actor" or "critic"."""
    root: Path
    size_bytes: float = 0.0
    """Size of one folder, for a warning before the disk is full; 0: unknown."""
    must_wait: bool = True
    cut_off: int | None = None
    """The step whose folder was incomplete when the previous start ended."""
    keep_last: int | None = None
    keep_best: int | None = None
    """Number of newest and of best evaluated folders to keep; both None: all."""
    warned_room_at: int | None = None
    scores: dict[int, float] = field(default_factory=dict)
    """Evaluation score of the weights after each step, in order of evaluation; higher is better."""

    def folder(self, step: int) -> Path:
        """Returns the folder for the weights after global step `step` (counted from 0)."""
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        return self.root / f"epoch{epoch}epochstep{epoch_step}globalstep{step}"

    def after_step(self, step: int) -> None:
        """Saves if due; `step` is the last finished global step, its weights still in place."""
        self.save_if_due(step)
        self.commit_staged()
        self._watch_room(step)

    def finish(self, step: int) -> Path:
        """Saves and returns the folder after `step`; RunError if that fails."""
        folder = self.folder(step)
        if not self.finish_step(step):
            why = self.error if self.under_way is None else "it was still being written"
            raise RunError(f"{folder} could not be saved: {why}; {self.good}") from self.error
        self._prune()  # the last export may have been evaluated after it was written
        return folder

    def resume(self, step: int) -> None:
        """Resumes with the weights after `step`: an incomplete folder is written again if it is of
        this step, else reported."""
        cut, self.cut_off = self.cut_off, None
        if cut is None:
            return
        folder, was_cut = self.folder(cut), "was being written when the run ended"
        if cut == step:
            log.info("%s %s: it is written again", folder, was_cut)
            self.save_now(step)
        else:
            text = "%s %s, and cannot be written again from the checkpoint of step %d"
            log.warning(text, folder, was_cut, step + 1)

    def scored(self, step: int, score: float) -> None:
        """Notes the evaluation score after `step` (-1: untrained); higher is better."""
        self.scores[step] = score

    def state(self) -> dict[str, Any]:
        """Returns the state for a resume, as JSON values; the folders themselves are on disk."""
        return {
            "last_saved": self.last_saved,
            "under_way": None if self.under_way is None else self.under_way[0],
            "scores": [list(pair) for pair in dict(self.scores).items()],
            "frequency": self.frequency.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        last, cut = int(state["last_saved"]), state.get("under_way")
        self.cut_off = None if cut is None else int(cut)
        if self.cut_off is not None and self.folder(self.cut_off).is_dir():
            last, self.cut_off = self.cut_off, None
        # The folder may be deleted, or on a lost machine.
        self.last_saved = last if last >= 0 and self.folder(last).is_dir() else -1
        self.scores = {int(step): float(score) for step, score in state["scores"]}
        self.frequency.restore(state["frequency"])

    @property
    def good(self) -> str:
        last = self.last_saved
        if self.under_way is not None and self.under_way[1].is_whole:
            last = self.under_way[0]
        return (
            "no earlier one exists" if last < 0 else f"the last complete one is {self.folder(last)}"
        )

    def describe(self, step: int) -> str:
        return str(self.folder(step))

    def stage(self, step: int) -> None:
        folder, is_async = str(self.folder(step).absolute()), self.is_async and not self.is_ending
        self.learner.call_all("export", role=self.role, folder=folder, is_async=is_async)

    def commit(self, step: int) -> Callable[[], dict[str, Any]]:
        """Rank 0 renames the folder after all ranks have written."""
        return self._exported

    def _exported(self) -> dict[str, Any]:
        outcome: dict[str, Any] = self.learner.query("exported", role=self.role)
        if (failure := failure_in(outcome)) is not None:
            raise failure
        return outcome

    def on_saved(self, step: int, result: dict[str, Any]) -> None:
        log.info("saved %s", self.folder(step))
        self._prune()

    def on_failed(self, error: Exception) -> None:
        with suppress(OSError):
            sweep(self.root)  # incomplete folders of a killed writer

    def _prune(self) -> None:
        """Removes folders that neither `keep_last` nor `keep_best` keeps, up to the last complete
        one."""
        if self.keep_last is None and self.keep_best is None:
            return
        found = {int(m[1]): f for f in self.root.glob("epoch*") if (m := FOLDER.fullmatch(f.name))}
        scores = dict(self.scores)  # evaluations come from another thread
        for step in outdated(found, self.last_saved, self.keep_last, self.keep_best, scores):
            gone = found[step].with_name(f".{found[step].name}.removed-{os.getpid()}")
            try:
                found[step].rename(gone)  # renamed first: no incomplete folder under this name
                shutil.rmtree(gone)
            except OSError as error:
                log.warning("%s could not be removed: %s", found[step], error)
            else:
                rule = f"keep_last = {self.keep_last}, keep_best = {self.keep_best}"
                log.info("removed %s (saver.%s)", found[step], rule)

    def _watch_room(self, step: int) -> None:
        """Warns, repeatedly, while the disk has no space for another folder."""
        if self.warned_room_at is not None and step < self.warned_room_at + MAX_WAIT_STEPS:
            return
        place = next(path for path in (self.root, *self.root.parents) if path.exists())
        free = shutil.disk_usage(place).free
        if self.under_way is None and free < self.size_bytes:
            self.warned_room_at = step
            log.warning(
                "step %d: %s has %.3g GiB left, and the model takes %.3g GiB: as it is, the model "
                "cannot be saved; make room, training continues meanwhile",
                step + 1,
                place,
                free / GIB,
                self.size_bytes / GIB,
            )


def outdated(
    steps: Iterable[int],
    last_saved: int,
    keep_last: int | None,
    keep_best: int | None,
    scores: Mapping[int, float],
) -> list[int]:
    """Returns the steps to remove from disk. Steps after the last saved one are from before a
    rollback and not counted; steps that may still be evaluated stay until then."""
    present = sorted(step for step in steps if step <= last_saved)
    kept = set(present[-(keep_last or 1) :])
    if keep_best is not None:
        finite = [step for step in present if math.isfinite(scores.get(step, math.nan))]
        kept |= set(sorted(finite, key=lambda step: (scores[step], step))[-keep_best:])
        kept |= {step for step in present if step > max(scores, default=-1)}
    return [step for step in present if step not in kept]


def rescue(saver: Saver, num_done: int, num_moved: int) -> None:
    """After a failure: exports the trained state if available; logs its own errors, because the
    caller raises the failure."""
    try:
        folder = saver.finish(num_done - 1)
    except Exception as error:  # the first failure is the one to be raised
        log.warning("after the failure: the model is not saved: %s", error)
        return
    more = f", and {num_moved} updates of step {num_done + 1}" if num_moved else ""
    text = f"what was trained before the failure ({num_done} steps{more}) is saved in {folder}"
    log.info("%s", text, extra=NOTICE)
