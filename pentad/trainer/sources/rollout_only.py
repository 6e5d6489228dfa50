"""A run that only samples, with the initial weights and without a learner.

Gids, seeds, rewards and drops are the same as in a run that trains. Each step writes its groups and
the position in the data to a file in `batches/`; a restarted run resumes after the last file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pentad.checkpoint.folders import Checkpoint
from pentad.config.schema import Config
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.types import Group
from pentad.data.ledger import Ledger
from pentad.data.store import MemoryStore
from pentad.engine.engine import build_engine
from pentad.engine.section import EngineSettings, ModelConfig
from pentad.rl.metrics import sample_metrics
from pentad.runtime.rank import Rank, rank_from_environment
from pentad.sync.publisher import Publisher, Snapshot, take_snapshot
from pentad.telemetry.log import NOTICE, announced
from pentad.telemetry.record import Funnel, PhaseTimer, StepRecord
from pentad.trainer.context import RunSummary
from pentad.trainer.preflight import Checked, check_train, size_of
from pentad.trainer.processes.ranks import run_once
from pentad.trainer.processes.supervisor import RunJob
from pentad.trainer.pumps.rollout_pump import RolloutPump, rejection
from pentad.trainer.pumps.scheduler import Scheduler
from pentad.trainer.pumps.state import Budget, RunState
from pentad.trainer.rank.learners import backend_of, start_run, weights_folder
from pentad.trainer.rank.update import BatchFacts
from pentad.trainer.records import TrainedBatch, rl_of
from pentad.trainer.run import BatchSource, Run, RunInputs, lead
from pentad.trainer.sampling.evaluate import Scorers, open_executors
from pentad.trainer.sampling.placement import DeviceTurns, Placement
from pentad.trainer.sampling.samplers import SamplerOpener
from pentad.trainer.saving.batches import BatchKeeper, kept_steps, read_batch
from pentad.trainer.sources.rollouts import watchdog_of
from pentad.trainer.stopping import stopped

log = logging.getLogger(__name__)


def run_rollout_only(
    config: Config, notes: Sequence[str] = (), fresh: bool = False, device: str = "auto"
) -> RunSummary:
    own = rank_from_environment()
    if own is not None and own.world > 1:
        rule = "has no ranks, and torchrun started several"
        raise UserError(Problem("only = rollout", rule, "start it without torchrun"))
    job = RunJob(
        lead, lambda _, rank, where: NoLearner(where), begin_rollout_only, config, notes, device
    )
    return run_once(job, fresh=fresh)


def begin_rollout_only(config: Config, device: torch.device) -> RunInputs:
    checked = check_train(config, device)
    start_run(config, ("actor",))
    return RunInputs(
        command="train",
        title="rollout",
        dims=checked.dims,
        data=checked.stream,
        roles=(),
        evaluates=False,
        open=partial(open_samples, checked),
        describe_progress=lambda run: f"{run.trained} steps are sampled",
    )


class NoLearner:
    """The service of a run that trains nothing."""

    mild: frozenset[str] = frozenset()

    def __init__(self, device: torch.device) -> None:
        self.rank = Rank()
        self.device = device

    def progress(self) -> dict[str, int]:
        return {"num_done": 0, "num_moved": 0}

    def close(self, *, is_failed: bool) -> None:
        """No cleanup needed between steps."""


async def open_samples(checked: Checked, run: Run, stack: AsyncExitStack) -> SampleSource:
    config, context = run.config, run.context
    size = config.train_dataset.batch_size
    budget = Budget(size, config.max_staleness, run.num_steps)
    state = RunState(Ledger(size), MemoryStore(), budget, stop=run.stop)
    servers = context.folder.file("servers/")
    samplers = await SamplerOpener(
        config, checked.dims, checked.tokenizer, context.device, servers, stack
    ).open()
    with announced(log, "weights for the samplers"):
        first = first_weights(config, context.device)
        await Publisher(list(samplers.values())).publish(first)
    rewards = Scorers(stack)
    executor = await open_executors(checked, samplers, rewards, stack, purpose="train")
    turns = DeviceTurns(Placement(is_shared=False, max_staleness=config.max_staleness), [])
    rollout = RolloutPump(
        *(state, checked.stream, executor, turns, rejection(config.algorithm)),
        max_groups=config.rollout.max_concurrent_groups,
    )
    scheduler = Scheduler(state.request_stop, watchdog_of(run, state, samplers), rollout)
    batches = context.batch_keeper(size_of(config, checked, run.num_steps))
    batches.facts["data"] = checked.stream.state()
    return SampleSource(run, checked, state, scheduler, batches)


@dataclass(eq=False)
class SampleSource(BatchSource):
    """Batches that are written instead of trained."""

    run: Run
    checked: Checked
    state: RunState
    scheduler: Scheduler
    writer: BatchKeeper

    def check(self, checkpoint: Checkpoint) -> None:
        """Never called: such a run has no checkpoints."""

    def restored(self, checkpoint: Checkpoint | None) -> None:
        """Resumes after the last step that has no missing step before it."""
        kept, done = kept_steps(self.writer.folder), 0
        while done + 1 in kept:
            done += 1
        if beyond := kept[done:]:
            rule = f"has steps {beyond[0]} to {beyond[-1]}, and step {done + 1} is missing"
            remedy = "restore it, start over with --fresh, or give another trial_name"
            raise UserError(Problem(str(self.writer.folder), rule, remedy))
        self.run.context.recorder.resume(done)
        if not done:
            return
        last = read_batch(self.writer.folder, done).facts
        self.checked.stream.check_state(last["data"])
        self.state.resume(last["ledger"], [], done)
        self.run.trained = done
        log.info("resumed after step %d", done, extra=NOTICE)

    async def begin(self) -> None:
        self.run.context.started(self.run.trained)

    async def drive(self, steps: Coroutine[Any, Any, None]) -> None:
        await self.scheduler.run(steps)

    async def train(self, step: int, timer: PhaseTimer) -> TrainedBatch | None:
        """Waits for a complete batch, writes it and opens the next one."""
        state = self.state
        what, is_ready = f"the groups of batch {step}", partial(state.ledger.are_ready, step)
        with timer.phase("rollout"):
            await state.wait_for("collect", what, is_ready)
        if not is_ready():
            return None
        groups = state.lease(step, range(state.budget.groups_per_batch))
        gids = [group.gid for group in groups]
        state.ledger.ack(gids)
        with timer.phase("save"):
            self._write(step + 1, groups)
        state.drop(gids)
        state.budget.count_trained()
        state.budget.count_published(state.budget.trained)
        state.changed.notify()
        lengths = [len(sample.ids) for group in groups for sample in group.samples]
        facts, funnel = BatchFacts([], [], lengths, sample_metrics(groups)), state.ledger.funnel()
        return TrainedBatch(step, facts, timer, groups, funnel, is_off_policy=True)

    def _write(self, step: int, groups: Sequence[Group]) -> None:
        try:
            self.writer.write(step, groups, {"ledger": self.state.ledger.snapshot()})
        except OSError as error:
            raise RunError(f"step {step}: its groups cannot be written: {error}") from error

    def record(self, trained: TrainedBatch) -> StepRecord:
        step, num_tokens = trained.batch + 1, sum(trained.facts.lengths)
        phases = trained.timer.phases_ms()
        wall_ms = sum(phases.values())
        return StepRecord(
            step=step,
            epoch=(step - 1) // self.run.context.steps_per_epoch,
            version=0,
            time_s=time.time(),
            num_groups=len(trained.groups),
            num_samples=len(trained.facts.lengths),
            num_tokens=num_tokens,
            tokens_per_sec=num_tokens / wall_ms * 1e3 if wall_ms else None,
            wall_clock_ms=wall_ms,
            phases=phases,
            rl=rl_of(trained),
            funnel=Funnel(**asdict(trained.funnel)) if trained.funnel else None,
        )

    def summary(self, model: Path | None) -> RunSummary:
        """Returns the summary, with the folder of sampled groups in place of a model."""
        run = self.run
        folder = run.context.folder.file("batches/")
        if run.trained < run.num_steps:
            rest = f"after {run.trained} of {run.num_steps} steps, whose groups are in "
            rest += f"{folder}; started again, it resumes there"
            raise stopped(run.stop.reason, rest)
        return RunSummary(run.context.folder.path, folder, run.trained)


def first_weights(config: Config, device: torch.device) -> Snapshot:
    """Reads the actor's initial weights on the CPU, as a snapshot for samplers on this device."""
    path, weights = config.model_folder(), weights_folder(config, "actor")
    dtype = config.actor.compute_dtype(device.type)
    engine = build_engine(
        path,
        EngineSettings(
            model=ModelConfig(
                dtype=dtype,
                param_dtype=config.actor.param_dtype,
                dequantize=config.actor.dequantize,
            )
        ),
        init_from_scratch=weights is None,
        seed=config.seed,
        weights=weights,
        backend=backend_of(config, "actor"),
    )
    return take_snapshot(0, engine.iter_weights(), copy=True)
