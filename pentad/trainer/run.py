"""The loop of every run: batches from a source, each trained, guarded, published, saved, recorded.

Reinforcement learning, training on examples and training on kept groups differ only in the source
of batches and in how the learner trains them (`BatchSource`). This file has the common part: the
restore before the first step, the work after each step, and the end of a run (complete, stopped or
failed).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pentad.checkpoint.folders import Checkpoint, folder_of
from pentad.config.load import record_values
from pentad.config.rules.unused_keys import Command
from pentad.config.schema import Config
from pentad.core.device import freeze_gc
from pentad.core.dims import ModelDims
from pentad.core.errors import RunError
from pentad.core.files import json_digest
from pentad.rl.bounds import Bounds
from pentad.runtime.learner_client import LearnerClient
from pentad.telemetry import host
from pentad.telemetry.log import announced
from pentad.telemetry.record import MemoryUse, PhaseTimer, StepRecord
from pentad.trainer.context import RunContext, RunData, RunSummary, open_run
from pentad.trainer.processes.resources import Regroup
from pentad.trainer.processes.supervisor import Supervisor
from pentad.trainer.pumps.scheduler import HangWatch, Scheduler
from pentad.trainer.pumps.state import ProcessRandom
from pentad.trainer.rank.learners import Role
from pentad.trainer.records import TrainedBatch
from pentad.trainer.resume import finished, resume, roll_back
from pentad.trainer.run_folders import describe_progress, now_text
from pentad.trainer.saving.batches import BatchKeeper
from pentad.trainer.saving.recovery import (
    RecoverHandler,
    finish_saves,
    save_after_failure,
)
from pentad.trainer.saving.saver import Saver
from pentad.trainer.stopping import (
    StopFlag,
    cut_short,
    stop_flag,
    stop_task_early,
)

log = logging.getLogger(__name__)


def progress_of_checkpoints(run: Run) -> str:
    return describe_progress(run.config)


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The inputs of a run, read and checked."""

    command: Command
    title: str
    dims: ModelDims
    data: RunData
    roles: tuple[Role, ...]
    """Learners: the actor comes first."""
    evaluates: bool
    open: Callable[[Run, AsyncExitStack], Awaitable[BatchSource]]
    """Builds the learners and opens the source of batches; the stack closes it. Adds the source's
    state to `run.recover` for checkpoints."""
    describe_progress: Callable[[Run], str] = progress_of_checkpoints
    """Describes the progress of the run before its first step."""
    is_shown: bool = True
    """Whether messages and steps are shown on the screen; else they are in the run folder only."""


class BatchSource(ABC):
    """The source of a run's batches, and the training of a batch on the learner."""

    run: Run
    saves_first = False
    """Whether a step is saved and recorded before its weights are published."""
    batches: BatchKeeper | None = None
    """Keeps the groups of the last steps."""

    @abstractmethod
    def check(self, checkpoint: Checkpoint) -> None:
        """Restores the source's state from a checkpoint; UserError if the data differ from the
        checkpoint's."""

    def restored(self, checkpoint: Checkpoint | None) -> None:
        """Called on the learner's thread after the learners were restored: loads frozen weights for
        scoring that the checkpoint does not contain."""
        saved = sorted(self.run.recover.tags)
        self.run.learner.call_all("load_tags", has=saved, step=self.run.trained)

    @abstractmethod
    async def begin(self) -> None:
        """Runs the self-test and the first evaluation, and writes the manifest entry."""

    @abstractmethod
    async def train(self, step: int, timer: PhaseTimer) -> TrainedBatch | None:
        """Trains a step, counted from 0; None if the run was stopped before the batch was
        complete."""

    async def after_update(self, trained: TrainedBatch) -> None:  # noqa: B027
        """Called after the step is counted, with its weights in place, before anything is saved."""

    async def take_weights(self, version: int, timer: PhaseTimer) -> Any:  # noqa: B027
        """Returns a snapshot of the learner's weights; None if nothing receives them."""

    async def publish(self, snapshot: Any, timer: PhaseTimer) -> None:  # noqa: B027
        """Publishes a snapshot and keeps no reference to it, which is a whole model."""

    async def drive(self, steps: Coroutine[Any, Any, None]) -> None:
        """Runs the steps, and the pumps that make batches."""
        run = self.run
        watch = HangWatch(run.config.stall_abort_s, run.context.folder.file("log.txt"))
        # Learners in other processes are monitored by their rank group.
        await Scheduler(run.stop.request, None if run.learner.is_remote else watch).run(steps)

    def doing(self, what: str) -> AbstractContextManager[None]:
        """Names the work in progress while active, for the report of a stalled run."""
        return nullcontext()

    def record(self, trained: TrainedBatch) -> StepRecord:
        run = self.run
        memory = MemoryUse(**run.learner.query("memory"))
        return run.context.steps.record(trained, memory, run.savers.get("actor"), run.recover)

    def keep(self, trained: TrainedBatch) -> None:
        """Writes the kept files of a step, before its record."""
        if self.batches is not None:
            write_trained = partial(self.run.learner.query, "keep_trained")
            self.batches.keep(trained.batch + 1, trained.groups, write_trained)

    def summary(self, model: Path | None) -> RunSummary:
        """Returns the summary; RunError if the run stopped early. `model`: the last export."""
        run = self.run
        next_start = run.recover.next_start
        run.stop.check_complete(run.trained, run.num_steps, model, next_start=next_start)
        assert model is not None, "a complete run has steps"
        evals = run.context.recorder.evaluations()
        return RunSummary(run.context.folder.path, model, run.trained, evals)


CheckInputs = Callable[[Config, torch.device], RunInputs]
"""Reads the inputs of a run; raises one UserError with every problem."""


def lead(
    learner: LearnerClient,
    config: Config,
    notes: Sequence[str],
    fresh: bool,
    supervisor: Supervisor,
) -> RunSummary:
    """Runs the job with its learners, on rank 0 or in the only process."""
    inputs: RunInputs = supervisor.checked
    with open_run(
        config,
        notes,
        inputs.data,
        command=inputs.command,
        title=inputs.title,
        fresh=fresh,
        dims=inputs.dims,
        device=learner.device,
        is_shown=inputs.is_shown,
    ) as context:
        if done := finished(context, roles=inputs.roles, evaluates=inputs.evaluates):
            return done
        return supervisor.resources.runner.run(Run(context, learner, supervisor, inputs).run())


class Run:
    """A run, with one generation of its learners."""

    def __init__(
        self,
        context: RunContext,
        learner: LearnerClient,
        supervisor: Supervisor,
        inputs: RunInputs,
    ) -> None:
        self.context = context
        self.config = context.config
        self.supervisor = supervisor
        self.inputs = inputs
        self.num_steps = context.num_steps
        self.learner = learner
        self.savers = {role: open_saver(context, learner, role) for role in inputs.roles}
        self.recover = open_recovery(context, learner, self.savers)
        self.bounds = Bounds(self.config.guards)
        self.recover.add("stats_logger_info", "bounds", self.bounds)
        self.trained = 0
        """Number of steps trained."""
        self.is_restored = False
        """Whether the learners have been restored."""
        self.stop = StopFlag()
        """The signal that stops the run, from the first step on."""
        self.timer: PhaseTimer | None = None
        """Timer of the next step, if it has begun."""
        self.unrecorded: tuple[BatchSource, TrainedBatch] | None = None
        """A batch that is trained but not recorded."""

    @property
    def saver(self) -> Saver:
        return self.savers["actor"]

    async def run(self) -> RunSummary:
        with ExitStack() as stepping:
            try:
                source = await self._train(stepping)
            except (Exception, asyncio.CancelledError) as error:
                if cut := self._cut_short(error):
                    raise cut from None
                is_lost = self.learner.is_given_up or isinstance(error, Regroup)
                if self.is_restored and not is_lost:
                    self._rescue()
                raise
            try:
                savers = list(self.savers.values())
                folders = finish_saves(self.recover, savers, self.trained, self.stop)
            except KeyboardInterrupt:
                raise self._cut(step=None) from None
        return source.summary(folders[0] if folders else None)

    async def _train(self, stepping: ExitStack) -> BatchSource:
        """Runs all steps, without the last save. From the first step on, `stepping` has the signal
        handlers."""
        async with AsyncExitStack() as stack:
            stack.callback(lambda: self.learner.close(self.config.stall_abort_s))
            with stop_task_early(partial(self.inputs.describe_progress, self)):
                try:
                    source = await self.inputs.open(self, stack)
                    await self.learner.run(lambda: self._restore(source))
                    await source.begin()
                except asyncio.CancelledError:
                    self.learner.is_given_up = True  # no trained state to save
                    raise
            stepping.enter_context(stop_flag(self.stop))
            self.learner.is_stopping = lambda: bool(self.stop.reason)
            try:
                await source.drive(self.steps(source))
            except asyncio.CancelledError:
                self.learner.is_given_up = bool(self.stop.reason)
                raise
        return source

    def build(self, **given: Any) -> None:
        """Builds the models, on all ranks."""
        with announced(log, "making the model"):
            self.learner.call_all("build", **given)
        self.context.steps.num_nodes = self.learner.call_all("count_nodes")

    def _restore(self, source: BatchSource) -> None:
        checkpoint = resume(self.context, self.recover, source.check)
        self.trained = 0 if checkpoint is None else checkpoint.step + 1
        self.is_restored = True
        source.restored(checkpoint)
        if checkpoint is not None:
            for saver in self.savers.values():
                saver.resume(checkpoint.step)
        self.recover.prepare()
        self.supervisor.note_loaded()

    # Steps

    async def steps(self, source: BatchSource) -> None:
        num_steps = 0
        while not (self.stop.reason or self.trained >= self.num_steps):
            await self._step(source)
            num_steps += 1
            freeze_gc(num_steps, is_loop=True)

    async def _step(self, source: BatchSource) -> None:
        timer, self.timer = self.timer or PhaseTimer(), None
        trained = await source.train(self.trained, timer)
        if trained is None:
            return
        self.unrecorded = source, trained
        self.supervisor.note_step()
        self.trained = trained.batch + 1
        sentence = await self._guard(source, trained)
        await source.after_update(trained)
        snapshots = [await source.take_weights(self.trained, timer)]
        if source.saves_first:
            await self._save(source, trained, sentence)
            assert self.timer is not None, "it begins with the record"
            timer = self.timer
        await source.publish(snapshots.pop(), timer)
        if not source.saves_first:
            await self._save(source, trained, sentence)

    async def _guard(self, source: BatchSource, trained: TrainedBatch) -> str:
        """Returns the message that ends a run after a bound was exceeded for too long. Before that,
        restores an earlier checkpoint up to `guards.max_rollbacks` times."""
        step, signs = trained.batch, trained.facts.signs
        for result in trained.steps:
            if result.skipped:
                log.warning("step %d: nothing was updated: %s", step + 1, result.reason)
        if signs is not None and signs.num_impossible:
            text = "step %d: %d sampled tokens are impossible under the policy that is trained"
            log.warning(text, step + 1, signs.num_impossible)
        sentence = self.bounds.past(trained.steps, signs)
        if not sentence:
            return ""
        back = partial(roll_back, self.context, self.recover, self.bounds, step, sentence)
        with trained.timer.phase("train"), source.doing("rolling back to a checkpoint"):
            return await self.learner.run(back)

    async def _save(self, source: BatchSource, trained: TrainedBatch, sentence: str) -> None:
        step = trained.batch + 1
        with source.doing(f"saving and recording step {step}"):
            await self.learner.run(lambda: self.save_and_record(source, trained))
        if sentence:
            raise RunError(f"step {step}: {sentence}")
        if step < self.num_steps:
            regroup_if_due, saves = self.supervisor.regroup_if_due, list(self.savers.values())
            await self.learner.run(lambda: regroup_if_due(self.recover, saves, trained.batch))

    def save_and_record(self, source: BatchSource, trained: TrainedBatch) -> None:
        """Saves and records a step, on the learner's thread, with its weights still in place."""
        self.unrecorded = None
        with trained.timer.phase("save"):
            for saver in self.savers.values():
                saver.after_step(trained.batch)
            self.recover.after_step(
                trained.batch, trained.progress, is_doubtful=self.bounds.is_doubtful
            )
        record = source.record(trained)
        self.timer = PhaseTimer(after=trained.timer)  # the next step's
        with self.timer.phase("record"):
            source.keep(trained)
            self.context.recorder.step(record, trained.groups)
            self.recover.commit_staged()

    # The end

    def _rescue(self) -> None:
        """After a failure: saves and records the trained state, if it is available."""
        progress = {"num_done": self.trained, "num_moved": 0}
        if not self.learner.is_gone:
            progress = self.learner.query("progress")
        num_done, num_moved = progress["num_done"], progress["num_moved"]
        is_whole = not (num_moved or self.learner.is_broken)
        source, late = self.unrecorded or (None, None)
        if source and late and late.batch == num_done - 1 and is_whole:
            try:
                self.save_and_record(source, late)
            except Exception as error:  # the first failure is raised
                log.warning("after the failure: step %d is not recorded: %s", late.batch + 1, error)
        savers = list(self.savers.values())
        save_after_failure(self.learner, self.recover, savers, self.stop, num_done, num_moved)

    def _cut_short(self, error: BaseException) -> RunError | None:
        """Returns the error if a second signal cancelled this task; then nothing is waited for. The
        watchdog cancels it too if the event loop blocks; then the trained state is saved."""
        task = asyncio.current_task()
        if not (self.stop.reason and task and isinstance(error, asyncio.CancelledError)):
            return None
        task.uncancel()
        return self._cut(step=self.trained + 1)

    def _cut(self, step: int | None) -> RunError:
        saved = self.saver.good if self.savers else f"{self.trained} steps are kept"
        return cut_short(self.stop.reason, step, saved, self.recover.next_start)


def open_saver(context: RunContext, learner: LearnerClient, role: str) -> Saver:
    config = context.config.saver
    return Saver(
        learner=learner,
        role=role,
        root=context.checkpoints / folder_of(role),
        frequency=context.frequency(config),
        steps_per_epoch=context.steps_per_epoch,
        is_async=context.saves_beside,
        size_bytes=context.export_bytes,
        keep_last=config.keep_last,
        keep_best=config.keep_best,
    )


def open_recovery(
    context: RunContext, learner: LearnerClient, savers: Mapping[Role, Saver]
) -> RecoverHandler:
    """Opens recovery for a run with these savers, by role; closed with the context."""
    config, values = context.config, record_values(context.config)
    facts = {
        "config": values,
        "config_digest": json_digest(values),
        "allocation_mode": config.allocation_mode,
        "versions": host.versions(),
    }
    handler = RecoverHandler(
        learner=learner,
        roles=list(savers),
        tiers=context.tiers(),
        frequency=context.frequency(config.recover),
        steps_per_epoch=context.steps_per_epoch,
        is_on=config.recover.is_on and bool(savers),
        is_async=context.saves_beside,
        upload_timeout_s=config.checkpoint.finish_timeout_s,
        before_commit=context.recorder.sync,
        facts=lambda: {**facts, "time": now_text()},
    )
    context.stack.push(lambda kind, *_: handler.close(is_failed=kind is not None))
    handler.add("checkpoint_info", "frequency", handler.frequency)
    handler.add("stats_logger_info", "recorder", context.recorder)
    handler.add("stats_logger_info", "steps", context.steps)
    if learner.is_remote:  # else the learner's state contains it
        handler.add("dataloader_info", "random", ProcessRandom())
    for role, saver in savers.items():
        handler.add("saver_info", folder_of(role), saver)
    return handler
