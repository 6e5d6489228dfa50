"""Recovery checkpoints of a run: when one is saved, what is in it, and how a run goes on from it.

A checkpoint is the state of the learners after a step (`checkpoint.shards`, every rank its part),
the state of all else that the run continues from (JSON, and the samples of groups that wait for
training), and a commit. The record of the step is written before the commit, so that a run that
goes on from it has records without gaps. At most one is on its way; one that fails is reported,
training goes on, and it is tried again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pentad.checkpoint.disk import holding, raise_fence
from pentad.checkpoint.folders import (
    COMMIT,
    Checkpoint,
    Damaged,
    Unreadable,
    find_checkpoints,
    info_folder,
    read_file,
    read_json,
    reading,
    state_folder,
)
from pentad.checkpoint.job import CommitJob, FileSpec, Piece, run_job
from pentad.checkpoint.quarantine import quarantine
from pentad.checkpoint.tiers import Tiers
from pentad.checkpoint.writer import Pending, Writer
from pentad.core.errors import Problem, RunError, Transient, UserError
from pentad.data.packing import pack_groups
from pentad.telemetry.log import NOTICE
from pentad.trainer.learner_thread import Calls
from pentad.trainer.saver import MAX_WAIT_STEPS, Frequency, Saver, rescue
from pentad.trainer.state import DataProgress

log = logging.getLogger(__name__)

FAILED_S = 10.0
"""How long a run that failed waits for checkpoints that are on their way."""
GONE_S = 1.0
"""How long for one that lacks what a rank should have written that is gone: its writer ends too."""
POLL_S = 0.2
GROUPS = "groups.bin"
INFOS = (
    *("step_info", "saver_info", "evaluator_info"),
    *("stats_logger_info", "checkpoint_info", "dataloader_info"),
)
"""The small files, each a JSON object."""


class RunPart(Protocol):
    """Something that a run continues from besides its learners."""

    def state(self) -> dict[str, Any]:
        """As JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """What must still be the same when a run goes on, computed once; the caller compares."""

    compute: Callable[[], dict[str, Any]]
    known: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        if not self.known:
            self.known.update(self.compute())
        return self.known

    def restore(self, state: dict[str, Any]) -> None:
        pass


Check = Callable[[Checkpoint], None]
"""Looks at a checkpoint whose small files were read, and raises what it does not accept."""


@dataclass(slots=True)
class Point:
    """A finished step whose weights are in place."""

    step: int
    """Counted from 0."""
    progress: DataProgress | None = None


@dataclass(slots=True, kw_only=True)
class RecoverHandler:
    calls: Calls
    roles: Mapping[str, str]
    """Of the learner, by the name of their folder."""
    tiers: Tiers
    frequency: Frequency
    steps_per_epoch: int
    is_on: bool = True
    is_async: bool = True
    timeout_s: float = 1800.0
    """How long a commit waits for other ranks."""
    upload_timeout_s: float = 600.0
    """How long the end of the run waits for the store."""
    before_commit: Callable[[], None] = lambda: None
    facts: Callable[[], dict[str, Any]] = dict
    """What the manifest says besides, as JSON values."""
    parts: dict[tuple[str, str], RunPart] = field(default_factory=dict)
    """By file and name in it."""
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The small files of the checkpoint that is restored."""
    ready: bytes | None = None
    """The samples that waited for training in it."""
    counters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each learner that was restored."""
    point: Point | None = None
    receipts: tuple[str, ...] = ()
    """Of what is staged and not committed."""
    began: float = 0.0
    """When the last save began."""
    under_way: tuple[int, Pending] | None = None
    """A commit and its step."""
    awaited: tuple[str, ...] = ()
    """The receipts that it waits for."""
    last_saved: int = -1
    """The last step that is committed."""
    stall_ms: float | None = None
    commit_ms: float | None = None
    num_failed: int = 0
    """Since the last that succeeded."""
    retry_at: int | None = None
    is_owed: bool = False
    """Whether one was due while another was on its way."""
    generation: int | None = None
    """Of the learners: what an earlier one still writes does not count."""
    writer: Writer = field(default_factory=Writer)
    """Commits what the ranks have written."""

    @property
    def root(self) -> Path:
        return self.tiers.root

    @property
    def next_start(self) -> str:
        """Where the run goes on when it is started again, in words; empty: nowhere."""
        last = self.last_saved
        if self.under_way is not None and self.under_way[1].is_whole:
            last = self.under_way[0]
        if not self.is_on or last < 0:
            return ""
        return f"started again, the run goes on after step {last + 1}"

    def add(self, file: str, name: str, part: RunPart) -> None:
        """Saves the part with the checkpoints, and restores it if one is."""
        assert file in INFOS and not self.infos, "parts are added before a checkpoint is restored"
        self.parts[file, name] = part

    # Going on

    def restore(self, check: Check) -> Checkpoint | None:
        """The learners, and the parts that are known, from the newest checkpoint that is whole;
        None where there never was one, RunError where none can be used."""
        if not self.is_on:
            return None
        self.generation = raise_fence(self.root)
        while (checkpoint := self.tiers.find()) is not None:
            try:
                self._restore(checkpoint, check)
            except Damaged as error:
                place = quarantine(checkpoint, str(error))
                log.warning("%s; the checkpoint is set aside as %s", error, place)
                continue
            self.last_saved = checkpoint.step
            return checkpoint
        if found := self.tiers.set_aside():
            raise RunError(self._all_damaged(found))
        return None

    def _all_damaged(self, found: Mapping[str, int]) -> str:
        """`found`: the checkpoints that were set aside, the newest first."""
        place, step = next(iter(found.items()))
        more = f" and {len(found) - 1} more are" if found.keys() - {place} else " is"
        return (
            f"no recovery checkpoint of the run can be used: {place}{more} set aside as damaged; "
            f"`pentad verify-checkpoint {self.root} --restore` puts back what is whole; --fresh "
            f"begins at step 1 and gives up {step + 1} trained steps: their records, models and "
            "checkpoints are moved to earlier/"
        )

    def _restore(self, checkpoint: Checkpoint, check: Check) -> None:
        for role in self.roles:
            folder = state_folder(role, checkpoint.step)
            if not any(path.startswith(f"{folder}/") for path in checkpoint.manifest.files):
                where = f"recovery checkpoint {checkpoint.root / checkpoint.info}"
                remedy = "set the algorithm back, or start anew with --fresh"
                raise UserError(Problem(where, f"holds no {role}, which is trained", remedy))
        info = checkpoint.info
        self.infos = {name: read_json(checkpoint, f"{info}/{name}.json") for name in INFOS}
        path = f"{info}/{GROUPS}"
        self.ready = read_file(checkpoint, path) if path in checkpoint.manifest.files else None
        check(checkpoint)
        for name, role in self.roles.items():
            place = self._place(name, checkpoint.step)
            self.counters[name] = self.calls.call("restore_state", role=role, **place)
        for (file, name), part in self.parts.items():
            with reading(self.root / info / f"{file}.json"):
                if name in self.infos[file]:
                    part.restore(self.infos[file][name])

    def roll_back(self, now: int, before: Sequence[tuple[int, int]]) -> int | None:
        """Puts the learners' state of the newest checkpoint in place of theirs, and gives its step;
        None where there is none. `before`: when that was done (at, to). One that was gone back to
        is passed over for an older one, if there is any and nothing was committed since."""
        self._collect(now, wait=True)
        found = find_checkpoints(self.root) if self.is_on else []
        if before and found and found[0].step <= before[-1][0]:
            found = [one for one in found if one.step < before[-1][1]] or found
        for checkpoint in found:
            try:
                with holding(checkpoint.root / checkpoint.info / COMMIT):
                    for name, role in self.roles.items():
                        self.calls.call(
                            "roll_back", role=role, **self._place(name, checkpoint.step)
                        )
                return checkpoint.step
            except Damaged as error:
                place = quarantine(checkpoint, str(error))
                log.warning("%s; the checkpoint is set aside as %s", error, place)
            except Unreadable as error:  # read again, it may be whole
                raise Transient(str(error)) from error
        if found:
            raise RunError(f"no recovery checkpoint in {self.root} is whole to go back to")
        return None

    def _place(self, name: str, step: int) -> dict[str, Any]:
        """Of the state of a learner."""
        folder = state_folder(name, step)
        return {"root": str(self.root.absolute()), "step": step, "folder": folder}

    def prepare(self) -> None:
        """Makes the memory that saves beside training need, before the first is due."""
        if self.is_on and self.is_async:
            self.calls.call("prepare_state")

    # Saving

    def after_step(
        self, step: int, progress: DataProgress | None = None, *, is_doubtful: bool = False
    ) -> None:
        """Stages a checkpoint if one is due; the weights are those after `step`. While they are
        doubtful it waits: a rollback must find good ones."""
        self.point = Point(step, progress)
        if not self.is_on:
            return
        self._collect(step, wait=False)
        is_due = self.frequency.is_due(step + 1) or self.is_owed
        if is_doubtful:
            self.is_owed = is_due
            return
        if is_due or (self.retry_at is not None and step >= self.retry_at):
            self.is_owed = self.under_way is not None
            if not self.is_owed:
                self._stage(step)

    def commit(self) -> None:
        """Commits what is staged, once the step is recorded."""
        if not self.receipts or self.point is None:
            return
        self.before_commit()
        receipts, self.awaited, self.receipts = self.receipts, self.receipts, ()
        step, pending = self.point.step, Pending()
        try:
            job = CommitJob(
                self.root,
                info_folder(step),
                receipts,
                tuple(self._files(self.point)),
                self.facts(),
                self.timeout_s,
                self.tiers.keep_committed,
                generation=self.generation,
            )
            if self.is_async:
                pending = self.writer.submit(job)
            else:
                pending.settle(run_job(job))
        except (OSError, RunError) as error:
            pending.settle({}, error)
        self.under_way = (step, pending)
        self._collect(step, wait=not self.is_async)

    def finish(self) -> None:
        """The last finished step is committed when this returns, or it is said why not."""
        if not self.is_on or self.point is None:
            return
        step = self.point.step
        self._collect(step, wait=True)
        if self.last_saved == step:
            return
        if not self.receipts:
            self._stage(step)
        self.commit()
        self._collect(step, wait=True)

    def settle(self, step: int) -> bool:
        """Whether this step is committed; waits for it where that is under way."""
        if self.under_way is not None and self.under_way[0] == step:
            self._collect(step, wait=True)
        return self.last_saved == step

    def close(self, *, is_failed: bool) -> None:
        """Waits for what is on its way; after a failure a few seconds."""
        if self.point is not None and not is_failed:
            self._collect(self.point.step, wait=True)
        self.writer.close(self._patience_s if is_failed else None)
        self.tiers.close(FAILED_S if is_failed else self.upload_timeout_s)

    @property
    def _patience_s(self) -> float:
        is_gone = self.calls.is_torn and self.calls.is_apart
        lacks = any(not (self.root / name).exists() for name in self.awaited)
        return GONE_S if is_gone and lacks else FAILED_S

    def _stage(self, step: int) -> None:
        self.began = time.monotonic()
        receipts: list[str] = []
        for name, role in self.roles.items():
            place = {"root": str(self.root.absolute()), "folder": state_folder(name, step)}
            try:
                receipts += self.calls.call(
                    "save_state",
                    role=role,
                    is_async=self.is_async,
                    generation=self.generation,
                    **place,
                )
            except Transient:  # the ranks are gone
                raise
            except (OSError, RunError) as error:
                self._failed(step, step, error)
                return
        self.receipts = tuple(receipts)
        self.stall_ms = 1e3 * (time.monotonic() - self.began)

    def _files(self, point: Point) -> Iterator[FileSpec]:
        epoch, epoch_step = divmod(point.step, self.steps_per_epoch)
        infos: dict[str, dict[str, Any]] = {name: {} for name in INFOS}
        infos["step_info"] = {
            "epoch": epoch,
            "epoch_step": epoch_step,
            "global_step": point.step,
            "steps_per_epoch": self.steps_per_epoch,
        }
        for (file, name), part in self.parts.items():
            infos[file][name] = part.state()
        if point.progress is not None:
            infos["dataloader_info"]["ledger"] = point.progress.ledger
            if point.progress.gids:
                data = b"".join(pack_groups(point.progress.ready))
                yield self._file(point.step, GROUPS, data)
        for name, info in infos.items():
            yield self._file(point.step, f"{name}.json", json.dumps(info, indent=1).encode())

    def _file(self, step: int, name: str, data: bytes) -> FileSpec:
        return FileSpec(f"{info_folder(step)}/{name}", (Piece(name, (data,)),))

    def _collect(self, now: int, *, wait: bool) -> None:
        """What became of the commit that is on its way."""
        if self.under_way is None or not (wait or self.under_way[1].is_done):
            return
        step, pending = self.under_way
        self.under_way = None
        while not pending.is_done and not (self.calls.is_torn and self.calls.is_apart):
            pending.settled(POLL_S)
        try:
            notes = pending.wait(self._patience_s).get("notes", [])
        except (OSError, RunError) as error:
            self._failed(step, now, error)
            return
        self.commit_ms = 1e3 * (time.monotonic() - self.began)
        self.last_saved, self.num_failed, self.retry_at = step, 0, None
        log.info("recovery checkpoint of step %d: %s", step + 1, self.root / info_folder(step))
        for note in notes:
            log.warning("%s", note)
        self.tiers.after_commit(step)

    def _failed(self, step: int, now: int, error: Exception) -> None:
        self.num_failed += 1
        self.retry_at = now + min(2 ** (self.num_failed - 1), MAX_WAIT_STEPS)
        good = "there is none yet"
        if self.last_saved >= 0:
            good = f"a run that stops now goes on after step {self.last_saved + 1}"
        log.warning(
            "step %d: the recovery checkpoint of step %d could not be saved: %s; training goes on, "
            "and it is tried again after step %d; %s",
            now + 1,
            step + 1,
            error,
            self.retry_at + 1,
            good,
        )

    def rescue(self, num_done: int, num_moved: int) -> None:
        """After a failure: commits what was trained, if it can be had; the failure is raised
        anyway."""
        if self.point is None or self.point.step != num_done - 1 or num_moved:
            return
        try:
            self.finish()
        except Exception as error:  # the first failure is the one to be raised
            log.warning("after the failure: no recovery checkpoint is saved: %s", error)
            return
        if self.last_saved == self.point.step and self.is_on:
            log.info("%s", self.next_start, extra=NOTICE)


def progress_of(calls: Calls, trained: int) -> tuple[int, int]:
    """Batches that are in the weights, and updates of a further one; `trained` where the learners
    are gone."""
    if calls.is_torn and calls.is_apart:
        return trained, 0
    progress = calls.ask("progress")
    return progress["num_done"], progress["num_moved"]


def save_after_failure(
    calls: Calls,
    recover: RecoverHandler,
    savers: Sequence[Saver],
    num_done: int,
    num_moved: int = 0,
) -> None:
    """Saves what was trained, unless a rank is gone, without which no save can succeed; the
    failure is raised anyway. `num_moved` are updates of a further step that are in the weights."""
    if not num_done:
        return
    saves: list[Callable[[int, int], None]] = [recover.rescue]
    for save in saves + [partial(rescue, saver) for saver in savers]:
        if calls.is_torn:
            last = recover.next_start or "there is no recovery checkpoint"
            text = "after the failure: the ranks do not answer any more, so nothing is saved; %s"
            log.warning(text, last)
            return
        save(num_done, num_moved)
