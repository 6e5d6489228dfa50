"""HF exports of a run: when, where, how they are written, and the one at the end.

Asynchronous (`saver.mode`), every rank copies its blocks to host memory while they are those of the
step, and its writer process writes them beside training: at most one is under way. A folder
that cannot be written is reported at once and tried again after further steps. Folders that are
whole stay, unless `saver.keep_last` or `saver.keep_best` is set: then older ones go once a newer
one is whole.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentad.core.errors import RunError, Transient, UserError
from pentad.core.files import sweep
from pentad.core.machine import GIB
from pentad.telemetry.log import NOTICE
from pentad.trainer.saving import periodic
from pentad.trainer.saving.periodic import MAX_WAIT_STEPS, Periodic

log = logging.getLogger(__name__)

FOLDER = re.compile(r"epoch\d+epochstep\d+globalstep(\d+)")


@dataclass(slots=True, kw_only=True)
class Saver(Periodic):
    """Writes `{root}/epoch{E}epochstep{S}globalstep{G}` folders that transformers loads."""

    role: str
    """Whose weights: "actor" or "critic"."""
    root: Path
    size_bytes: float = 0.0
    """Of one folder, to warn before there is no room for it; 0: unknown."""
    keep_last: int | None = None
    keep_best: int | None = None
    """How many of the newest and of the best evaluated folders stay; both None: all."""
    under_way: tuple[int, float] | None = None
    """The step whose folder is being written, and the seconds its copy took."""
    warned_room_at: int | None = None
    scores: dict[int, float] = field(default_factory=dict)
    """Of the weights after a step, by step, in the order of evaluation; higher is better."""

    def folder(self, step: int) -> Path:
        """The folder for the weights after global step `step` (counted from 0)."""
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        return self.root / f"epoch{epoch}epochstep{epoch_step}globalstep{step}"

    def after_step(self, step: int) -> None:
        """Saves if due; `step` is the global step just finished, its weights still in place."""
        self._collect(step, wait=False)
        if self.is_due(step):
            self._collect(step, wait=True)
            if self.under_way is None:  # else the run is being stopped, and ends with an export
                self._save(step)
        self._watch_room(step)

    def finish(self, step: int) -> Path:
        """The folder after `step`, whole; RunError if that cannot be had."""
        self._collect(step, wait=True)
        folder = self.folder(step)
        for wait_s in (*periodic.LAST_WAITS_S, None):
            if self.last_saved == step:
                break
            try:
                self._export(step, is_async=False)
            except Transient:  # the ranks are gone
                raise
            except (OSError, RunError) as error:
                if wait_s is None or self.is_stopped:
                    raise RunError(f"{folder} could not be saved: {error}; {self.good}") from error
                log.warning("%s could not be saved: %s; trying again", folder, error)
                time.sleep(wait_s)
            else:
                self._succeeded(step)
        self._prune()  # the evaluation of the last export may have come after it
        return folder

    def scored(self, step: int, score: float) -> None:
        """The held-out evaluation of the weights after `step`; higher is better, -1: untrained."""
        self.scores[step] = score

    def state(self) -> dict[str, Any]:
        """What a run that is continued needs, for JSON; the folders themselves are on disk."""
        return {
            "last_saved": self.last_saved,
            "scores": [list(pair) for pair in dict(self.scores).items()],
            "frequency": self.frequency.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        last = int(state["last_saved"])  # the folder may be gone, or on a machine that was lost
        self.last_saved = last if last >= 0 and self.folder(last).is_dir() else -1
        self.scores = {int(step): float(score) for step, score in state["scores"]}
        self.frequency.restore(state["frequency"])

    @property
    def good(self) -> str:
        """Which folder there is, in words."""
        last = self.last_saved
        if self.under_way is not None and not self.learner.is_broken:
            status = self._status()
            last = self.under_way[0] if status["is_done"] and status["error"] is None else last
        return (
            "there is no earlier one" if last < 0 else f"the last whole one is {self.folder(last)}"
        )

    def _save(self, step: int) -> None:
        started = time.monotonic()
        try:
            self._export(step, is_async=self.is_async)
        except Transient:
            raise
        except (OSError, RunError, UserError) as error:
            self._failed(step, step, error)
            return
        if self.is_async:
            self.under_way = step, time.monotonic() - started
        else:
            self._succeeded(step)

    def _export(self, step: int, *, is_async: bool) -> None:
        folder = str(self.folder(step).absolute())
        self.learner.call_all("export", role=self.role, folder=folder, is_async=is_async)

    def _collect(self, now: int, *, wait: bool) -> None:
        """What became of the folder that is being written."""
        if self.under_way is None:
            return
        step, staging_s = self.under_way
        if wait and not self.wait_for(lambda: bool(self._status()["is_done"]), time.sleep):
            return
        status = self._status()
        if not status["is_done"]:
            return
        self.under_way = None
        if status["error"] is not None:
            self._failed(step, now, status["error"])
        else:
            self.commit_ms = 1e3 * (staging_s + status["seconds"])
            self._succeeded(step)

    def _status(self) -> dict[str, Any]:
        """Of the folder that is being written."""
        status: dict[str, Any] = self.learner.query("export_status", role=self.role)
        return status

    def _succeeded(self, step: int) -> None:
        self.succeeded(step)
        log.info("saved %s", self.folder(step))
        self._prune()

    def _prune(self) -> None:
        """Removes what neither `keep_last` nor `keep_best` keeps, up to the last that is whole."""
        if self.keep_last is None and self.keep_best is None:
            return
        found = {int(m[1]): f for f in self.root.glob("epoch*") if (m := FOLDER.fullmatch(f.name))}
        scores = dict(self.scores)  # evaluations come from another thread
        for step in outdated(found, self.last_saved, self.keep_last, self.keep_best, scores):
            gone = found[step].with_name(f".{found[step].name}.removed-{os.getpid()}")
            try:
                found[step].rename(gone)  # at no moment is there half a folder under its name
                shutil.rmtree(gone)
            except OSError as error:
                log.warning("%s could not be removed: %s", found[step], error)
            else:
                rule = f"keep_last = {self.keep_last}, keep_best = {self.keep_best}"
                log.info("removed %s (saver.%s)", found[step], rule)

    def _failed(self, step: int, now: int, error: Exception | str) -> None:
        with suppress(OSError):
            sweep(self.root)  # what a writer left that was killed
        text = "step %d: %s could not be saved: %s; %s; %s"
        log.warning(text, now + 1, self.folder(step), error, self.failed(now), self.good)

    def _watch_room(self, step: int) -> None:
        """Says as soon as the disk has no room for another folder, and now and then again."""
        if self.warned_room_at is not None and step < self.warned_room_at + MAX_WAIT_STEPS:
            return
        place = next(path for path in (self.root, *self.root.parents) if path.exists())
        free = shutil.disk_usage(place).free
        if self.under_way is None and free < self.size_bytes:
            self.warned_room_at = step
            log.warning(
                "step %d: %s has %.3g GiB left, and the model takes %.3g GiB: as it is, the model "
                "cannot be saved; make room, training goes on meanwhile",
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
    """Which of the steps on disk go. Later ones than the last saved are of a run that was set back
    and are not counted; what may still be evaluated stays until it is."""
    present = sorted(step for step in steps if step <= last_saved)
    kept = set(present[-(keep_last or 1) :])
    if keep_best is not None:
        finite = [step for step in present if math.isfinite(scores.get(step, math.nan))]
        kept |= set(sorted(finite, key=lambda step: (scores[step], step))[-keep_best:])
        kept |= {step for step in present if step > max(scores, default=-1)}
    return [step for step in present if step not in kept]


def rescue(saver: Saver, num_done: int, num_moved: int) -> None:
    """After a failure: exports what was trained, if it can be had; the failure is raised anyway."""
    try:
        folder = saver.finish(num_done - 1)
    except Exception as error:  # the first failure is the one to be raised
        log.warning("after the failure: the model is not saved: %s", error)
        return
    more = f", and {num_moved} updates of step {num_done + 1}" if num_moved else ""
    text = f"what was trained before the failure ({num_done} steps{more}) is saved in {folder}"
    log.info("%s", text, extra=NOTICE)
