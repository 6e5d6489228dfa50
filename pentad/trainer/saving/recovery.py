"""Recovery checkpoints of a run: their schedule, their content, and the resume from them.

A checkpoint consists of the state of the learners after a step (`checkpoint.shards`, every rank its
part), the other state of the run (JSON, and the samples of groups that wait for training), and a
commit. Each rank's save returns sizes and digests of its files, or its error; then a thread here
commits. The record of the step is written before the commit, so the records of a resumed run have
no gaps.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pentad.checkpoint.fence import holding, raise_fence
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
from pentad.checkpoint.writer import failure_in
from pentad.core.errors import FULL, Problem, RunError, Transient, UserError
from pentad.data.packing import pack_groups
from pentad.runtime.learner_client import LearnerClient
from pentad.telemetry.log import NOTICE
from pentad.trainer.pumps.state import DataProgress
from pentad.trainer.saving.periodic import FAILED_S, Periodic
from pentad.trainer.saving.saver import Saver, rescue
from pentad.trainer.stopping import StopFlag, stopped

log = logging.getLogger(__name__)

GROUPS = "groups.bin"
INFOS = (
    *("step_info", "saver_info", "evaluator_info"),
    *("stats_logger_info", "checkpoint_info", "dataloader_info"),
)
"""The small files of a checkpoint, each a JSON object."""


class RunPart(Protocol):
    """A part of the run's state besides its learners."""

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Values that must be equal when a run resumes, computed once; the caller compares them."""

    compute: Callable[[], dict[str, Any]]
    known: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        if not self.known:
            self.known.update(self.compute())
        return self.known

    def restore(self, state: dict[str, Any]) -> None:
        pass


Check = Callable[[Checkpoint], None]
"""Checks a checkpoint whose small files were read; raises if it does not fit the run."""


@dataclass(slots=True, kw_only=True)
class RecoverHandler(Periodic):
    roles: Sequence[str]
    """Roles of the learners."""
    tiers: Tiers
    is_on: bool = True
    upload_timeout_s: float = 600.0
    """How long the end of the run waits for uploads to the store, in seconds."""
    before_commit: Callable[[], None] = lambda: None
    facts: Callable[[], dict[str, Any]] = dict
    """Returns further facts for the manifest, as JSON values."""
    parts: dict[tuple[str, str], RunPart] = field(default_factory=dict)
    """Parts by file and by name in the file."""
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The small files of the restored checkpoint."""
    ready: bytes | None = None
    """The restored checkpoint's samples that wait for training."""
    counters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Counters by role, for each restored learner."""
    step: int | None = None
    """The last finished step, counted from 0, whose weights are in place."""
    progress: DataProgress | None = None
    """The progress of the data at its end."""
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    """The outcome on each rank, after a synchronous save."""
    was_full: bool = False
    """Whether older checkpoints were removed because the disk was full."""
    generation: int | None = None
    """The learners' generation; late writes of an earlier one are rejected."""

    @property
    def root(self) -> Path:
        return self.tiers.root

    @property
    def next_start(self) -> str:
        """Describes where the run resumes if restarted; empty if it cannot. Called at the end of a
        run: waits for a commit in progress, because it decides this."""
        last = self.last_saved
        if self.under_way is not None:
            self._settle_last()
            last = self.under_way[0] if self.under_way[1].is_whole else last
        if not self.is_on or last < 0:
            return ""
        return f"started again, the run resumes after step {last + 1}"

    def add(self, file: str, name: str, part: RunPart) -> None:
        """Adds a part of the state, to be saved and restored with checkpoints."""
        assert file in INFOS and not self.infos, "parts are added before a checkpoint is restored"
        self.parts[file, name] = part

    # Resuming

    def restore(self, check: Check) -> Checkpoint | None:
        """Restores learners and known parts from the newest intact checkpoint. None if there never
        was a checkpoint, RunError if none is usable."""
        if not self.is_on:
            return None
        self.generation = raise_fence(self.root)
        while (checkpoint := self.tiers.find()) is not None:
            try:
                self._restore(checkpoint, check)
            except Damaged as error:
                place = quarantine(checkpoint, str(error))
                log.warning("%s; the checkpoint is renamed to %s", error, place)
                continue
            self.last_saved = checkpoint.step
            return checkpoint
        if found := self.tiers.set_aside():
            raise RunError(self._all_damaged(found))
        return None

    @property
    def tags(self) -> set[str]:
        """The frozen weights of the actor in the restored checkpoint."""
        return set(self.counters["actor"]["tags"]) if self.counters else set()

    def data_state(self, checkpoint: Checkpoint, name: str) -> dict[str, Any]:
        """Returns the state of the data in a checkpoint whose small files were read."""
        with reading(checkpoint.root / checkpoint.info / "dataloader_info.json"):
            return dict(self.infos["dataloader_info"][name])

    def _all_damaged(self, found: Mapping[str, int]) -> str:
        """Returns the error text. `found`: the damaged checkpoints, newest first."""
        place, step = next(iter(found.items()))
        more = f" and {len(found) - 1} more are" if found.keys() - {place} else " is"
        return (
            f"no recovery checkpoint of the run can be used: {place}{more} set aside as damaged; "
            f"`pentad verify-checkpoint {self.root} --restore` restores intact ones; --fresh "
            f"begins at step 1 and gives up {step + 1} trained steps: their records, models and "
            "checkpoints are moved to earlier/"
        )

    def _restore(self, checkpoint: Checkpoint, check: Check) -> None:
        for role in self.roles:
            folder = state_folder(role, checkpoint.step)
            if not any(path.startswith(f"{folder}/") for path in checkpoint.manifest.files):
                where = f"recovery checkpoint {checkpoint.root / checkpoint.info}"
                remedy = "set the algorithm back, or start over with --fresh"
                raise UserError(Problem(where, f"holds no {role}, which is trained", remedy))
        info = checkpoint.info
        self.infos = {name: read_json(checkpoint, f"{info}/{name}.json") for name in INFOS}
        path = f"{info}/{GROUPS}"
        self.ready = read_file(checkpoint, path) if path in checkpoint.manifest.files else None
        check(checkpoint)
        self.counters = restore_learners(self.learner, checkpoint, self.roles)
        for (file, name), part in self.parts.items():
            with reading(self.root / info / f"{file}.json"):
                if name in self.infos[file]:
                    part.restore(self.infos[file][name])

    def roll_back(self, now: int, before: Sequence[tuple[int, int]]) -> int | None:
        """Restores the learners from the newest checkpoint, and returns its step; None if there is
        none. `before`: earlier rollbacks (at, to). A checkpoint that was already rolled back to is
        skipped for an older one, if there is one and nothing was committed since."""
        self.collect(now, wait=True)
        found = find_checkpoints(self.root) if self.is_on else []
        if before and found and found[0].step <= before[-1][0]:
            found = [one for one in found if one.step < before[-1][1]] or found
        for checkpoint in found:
            try:
                restore_learners(self.learner, checkpoint, self.roles, "roll_back")
                return checkpoint.step
            except Damaged as error:
                aside = quarantine(checkpoint, str(error))
                log.warning("%s; the checkpoint is renamed to %s", error, aside)
            except Unreadable as error:  # it may be readable on a later attempt
                raise Transient(str(error)) from error
        if found:
            raise RunError(f"no recovery checkpoint in {self.root} is intact: cannot roll back")
        return None

    def prepare(self) -> None:
        """Allocates the memory of asynchronous saves before the first is due."""
        if self.is_on and self.is_async:
            self.learner.call_all("prepare_state")

    # Saving

    def after_step(
        self, step: int, progress: DataProgress | None = None, *, is_doubtful: bool = False
    ) -> None:
        """Stages a checkpoint if one is due; the weights are those after `step`. Doubtful weights
        are not saved, because a rollback must restore good ones."""
        self.step, self.progress = step, progress
        if self.is_on:
            self.save_if_due(step, is_doubtful=is_doubtful)

    def stage(self, step: int) -> None:
        self.outcomes = []
        for role in self.roles:
            place = {"root": str(self.root.absolute()), "folder": state_folder(role, step)}
            self.outcomes += self.learner.call_all(
                "save_state",
                role=role,
                is_async=self.is_async,
                generation=self.generation,
                **place,
            )

    def commit(self, step: int) -> Callable[[], dict[str, Any]]:
        self.before_commit()
        job = CommitJob(
            self.root,
            info_folder(step),
            {},
            tuple(self._files(step)),
            facts=self.facts(),
            generation=self.generation,
        )
        return partial(self._commit, job)

    def _commit(self, job: CommitJob) -> dict[str, Any]:
        """Commits after all ranks have written their parts; raises the error of a rank."""
        outcomes = self.outcomes
        if self.is_async:
            outcomes = self.learner.query("saved_state", roles=list(self.roles))
        written = {path: file for one in outcomes for path, file in one["files"].items()}
        failures = [failure for one in outcomes if (failure := failure_in(one)) is not None]
        job = replace(job, written=written, failure=failures[0] if failures else None)
        return run_job(replace(job, keep_last=self._keep_last(written)))

    def _keep_last(self, written: Mapping[str, Any]) -> int:
        """Returns the number of checkpoints to keep: one if the disk was full and has no space for
        another."""
        size = sum(file["size"] for file in written.values())
        if self.was_full and self.tiers.remote is None:
            self.was_full = shutil.disk_usage(self.root).free < size
            return 1 if self.was_full else self.tiers.keep_committed
        return self.tiers.keep_committed

    def begin(self) -> None:
        """Saves the last finished step, if no other write is in progress."""
        if self.is_on and self.step is not None:
            self.save_now(self.step)

    def finish(self) -> None:
        """Commits the last finished step before returning, or logs why it cannot."""
        if self.is_on and self.step is not None:
            self.finish_step(self.step)

    def close(self, *, is_failed: bool) -> None:
        """Waits for writes in progress; only a few seconds after a failure."""
        if self.step is not None and not is_failed:
            self.collect(self.step, wait=True)
        self._settle_last()
        self.tiers.close(FAILED_S if is_failed else self.upload_timeout_s)

    def _settle_last(self) -> None:
        """Waits a few seconds for the commit in progress, once."""
        if self.under_way is not None and not self.is_given_up:
            self.is_given_up = bool(wait([self.under_way[1]], FAILED_S).not_done)

    def _files(self, step: int) -> Iterator[FileSpec]:
        def spec(name: str, data: bytes) -> FileSpec:
            return FileSpec(f"{info_folder(step)}/{name}", (Piece(name, (data,)),))

        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        infos: dict[str, dict[str, Any]] = {name: {} for name in INFOS}
        infos["step_info"] = {
            "epoch": epoch,
            "epoch_step": epoch_step,
            "global_step": step,
            "steps_per_epoch": self.steps_per_epoch,
        }
        for (file, name), part in self.parts.items():
            infos[file][name] = part.state()
        if self.progress is not None:
            infos["dataloader_info"]["ledger"] = self.progress.ledger
            if self.progress.ready:
                yield spec(GROUPS, b"".join(pack_groups(self.progress.ready)))
        for name, info in infos.items():
            yield spec(f"{name}.json", json.dumps(info, indent=1).encode())

    def describe(self, step: int) -> str:
        return f"the recovery checkpoint of step {step + 1}"

    @property
    def good(self) -> str:
        if self.last_saved < 0:
            return "there is none yet"
        return f"a run that stops now resumes after step {self.last_saved + 1}"

    def on_saved(self, step: int, result: dict[str, Any]) -> None:
        log.info("recovery checkpoint of step %d: %s", step + 1, self.root / info_folder(step))
        for note in result.get("notes", []):
            log.warning("%s", note)
        self.tiers.after_commit(step)

    def on_failed(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in FULL:
            self._make_room()

    def _make_room(self) -> None:
        """Removes older checkpoints for the next attempt, never the newest."""
        try:
            removed = self.tiers.make_room()
        except (OSError, RunError) as error:
            log.warning("older recovery checkpoints were not removed: %s", error)
            return
        for step in removed:
            self.was_full = True
            text = "the disk is full: the older recovery checkpoint of step %d is removed for room"
            log.warning(text, step + 1)

    def rescue(self, num_done: int, num_moved: int) -> None:
        """After a failure: commits the trained state if available; logs its own errors, because the
        caller raises the failure."""
        if self.step is None or self.step != num_done - 1 or num_moved:
            return
        try:
            self.finish()
        except Exception as error:  # the first failure is raised
            log.warning("after the failure: no recovery checkpoint is saved: %s", error)
            return
        if self.last_saved == self.step and self.is_on:
            log.info("%s", self.next_start, extra=NOTICE)


def restore_learners(
    learner: LearnerClient,
    checkpoint: Checkpoint,
    roles: Sequence[str],
    method: str = "restore_state",
) -> dict[str, Any]:
    """Restores the learners of these roles; returns the answer of each, by role."""
    root, step = str(checkpoint.root.absolute()), checkpoint.step
    with holding(checkpoint.root / checkpoint.info / COMMIT):
        return {role: learner.call_all(method, role=role, root=root, step=step) for role in roles}


def begin_ending(saves: Iterable[Periodic], stop: StopFlag) -> str:
    """Marks the steps of the run as done. Only a further signal ends the waiting; returns the name
    of an earlier one."""
    before = stop.reason
    for one in saves:
        one.is_ending, one.is_given_up = True, False
        one.is_cut = lambda: stop.reason != before
    return before


def finish_saves(
    recover: RecoverHandler, savers: Sequence[Saver], trained: int, stop: StopFlag
) -> list[Path | None]:
    """Saves the models of a run whose steps are done, while the recovery checkpoint of its last
    step is written. From here on a signal ends the waiting within FAILED_S seconds; a second one
    raises KeyboardInterrupt."""
    before = begin_ending((recover, *savers), stop)
    recover.begin()
    try:
        folders: list[Path | None] = [None]
        if trained:
            folders = [saver.finish(trained - 1) for saver in savers]
    except Exception as error:
        recover.finish()
        if stop.reason != before and isinstance(error, RunError):
            raise stopped(stop.reason, f"before the model was saved: {error}") from error
        raise
    recover.finish()
    is_behind = recover.is_on and trained > recover.last_saved + 1
    if stop.reason != before and is_behind:
        text = "before the recovery checkpoint of the last step was saved; the model is in "
        raise stopped(stop.reason, f"{text}{folders[0]}; {recover.next_start}")
    return folders


def save_after_failure(
    learner: LearnerClient,
    recover: RecoverHandler,
    savers: Sequence[Saver],
    stop: StopFlag,
    num_done: int,
    num_moved: int = 0,
) -> None:
    """Saves the trained state after a failure, unless a rank is lost, which makes every save fail.
    The caller raises the failure afterwards. `num_moved`: updates of a further step in the
    weights."""
    if not num_done:
        return
    begin_ending((recover, *savers), stop)
    saves: list[Callable[[int, int], None]] = [recover.rescue]
    for save in saves + [partial(rescue, saver) for saver in savers]:
        if learner.is_broken:
            last = recover.next_start or "there is no recovery checkpoint"
            cut = [one.describe(one.under_way[0]) for one in savers if one.under_way is not None]
            also = f", and {' and '.join(cut)} was being written and is incomplete" if cut else ""
            text = "after the failure: the ranks do not answer any more, so nothing is saved%s; %s"
            log.warning(text, also, last)
            return
        save(num_done, num_moved)
