"""A run that only samples: groups of every step by the weights it begins with, and no learner.

Gids, seeds, rewards and drops are those of a run that trains. Each step's groups are a file of
`batches/`, which holds the place in the data too: started again, it goes on after the last one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from pentad.config.derived import model_folder
from pentad.config.schema import Config
from pentad.core.device import pick_device
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.types import Group
from pentad.data.ledger import Ledger
from pentad.data.store import MemoryStore
from pentad.engine.engine import build_engine
from pentad.engine.section import EngineSettings, ModelConfig
from pentad.rl.metrics import sample_metrics
from pentad.runtime.rank import rank_from_environment
from pentad.sync.publisher import Publisher, Snapshot, take_snapshot
from pentad.telemetry.log import NOTICE, announced
from pentad.telemetry.record import Funnel, PhaseTimer, Rl, StepRecord
from pentad.trainer.batches import kept_steps, read_batch
from pentad.trainer.evaluate import open_executor, open_reward
from pentad.trainer.learners import backend_of, start_run, weights_folder
from pentad.trainer.placement import Placement, Turnstile
from pentad.trainer.preflight import Checked, check_train, size_of
from pentad.trainer.records import mean_parts
from pentad.trainer.rollout_pump import RolloutPump, rejection
from pentad.trainer.run import OpenRun, open_run
from pentad.trainer.samplers import SamplerOpener
from pentad.trainer.scheduler import NoPump, Scheduler, Watchdog
from pentad.trainer.state import Budget, RunState
from pentad.trainer.stopping import stop_task_early, stopped

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """What is left of it for whoever started it."""

    records: Path
    groups: Path
    num_steps: int


def run_rollout_only(
    config: Config, notes: Sequence[str] = (), fresh: bool = False, device: str = "auto"
) -> RolloutSummary:
    place, own = pick_device(device), rank_from_environment()
    if own is not None and own.world > 1:
        rule = "has no ranks, and torchrun started several"
        raise UserError(Problem("only = rollout", rule, "start it without torchrun"))
    checked = check_train(config, place)
    start_run(config, ("actor",))
    with open_run(
        config, notes, checked.stream, title="rollout", fresh=fresh, dims=checked.dims, device=place
    ) as run:
        return asyncio.run(RolloutOnly(config, checked, run, place).sample())


class RolloutOnly:
    """The parts of such a run."""

    def __init__(
        self, config: Config, checked: Checked, run: OpenRun, device: torch.device
    ) -> None:
        self.config = config
        self.checked = checked
        self.open = run
        self.device = device
        self.num_steps = run.num_steps
        self.batches = run.batches(size_of(config, checked, run.num_steps))
        self.batches.facts["data"] = checked.stream.state()
        size = config.train_dataset.batch_size
        budget = Budget(size, config.max_staleness, run.num_steps)
        self.state = RunState(Ledger(size), MemoryStore(), budget)

    async def sample(self) -> RolloutSummary:
        self._resume()
        async with AsyncExitStack() as stack:
            with stop_task_early(lambda: f"{self._num_done} steps are sampled"):
                scheduler = await self._open(stack)
            self.open.started(self._num_done)
            await scheduler.run()
        if self._num_done < self.num_steps:
            rest = f"after {self._num_done} of {self.num_steps} steps, whose groups are in "
            rest += f"{self.batches.folder}; started again, it goes on there"
            raise stopped(self.state.stop_reason, rest)
        return RolloutSummary(self.open.folder.path, self.batches.folder, self._num_done)

    @property
    def _num_done(self) -> int:
        return self.state.budget.trained

    def _resume(self) -> None:
        """After the last step of those that are there without a gap."""
        kept, done = kept_steps(self.batches.folder), 0
        while done + 1 in kept:
            done += 1
        if beyond := kept[done:]:
            rule = f"has steps {beyond[0]} to {beyond[-1]}, and step {done + 1} is missing"
            remedy = "bring it back, start anew with --fresh, or give another trial_name"
            raise UserError(Problem(str(self.batches.folder), rule, remedy))
        self.open.recorder.resume(done)
        if not done:
            return
        last = read_batch(self.batches.folder, done).facts
        self.checked.stream.check_state(last["data"])
        self.state.resume(last["ledger"], [], done)
        log.info("resumed after step %d", done, extra=NOTICE)

    async def _open(self, stack: AsyncExitStack) -> Scheduler:
        config, checked = self.config, self.checked
        servers = self.open.folder.file("servers/")
        samplers = await SamplerOpener(
            config, checked.dims, checked.tokenizer, self.device, servers, stack
        ).open()
        with announced(log, "weights for the samplers"):
            await Publisher(list(samplers.values())).publish(first_weights(config, self.device))
        reward = await open_reward(config, config.train_dataset.answer_key, stack)
        executor = open_executor(config, checked, samplers, reward, stack, purpose="train")
        placement = Placement(is_shared=False, max_staleness=config.max_staleness)
        rollout = RolloutPump(
            self.state,
            checked.stream,
            executor,
            placement,
            Turnstile(placement, []),
            rejection(checked.algorithm),
            max_groups=config.rollout.max_concurrent_groups,
        )
        watchdog = Watchdog(
            self.state,
            warn_s=config.stall_warning_s,
            abort_s=config.stall_abort_s,
            sampled=lambda: sum(one.stats()["tokens_drawn"] for one in samplers.values()),
        )
        return Scheduler(self.state, rollout, self, NoPump(), watchdog)

    async def run(self) -> None:
        """In the place of a train pump: takes whole batches in their order, writes and records
        them, and opens the next one."""
        state, size = self.state, self.state.budget.groups_per_batch
        while not state.is_over:
            batch, timer = state.budget.trained, PhaseTimer()
            what, is_ready = f"the groups of batch {batch}", partial(state.ledger.are_ready, batch)
            with timer.phase("rollout"):
                await state.wait_for("collect", what, is_ready)
            if not is_ready():
                return
            gids = state.ledger.lease(batch, range(size))
            groups = state.store.get(gids)
            state.ledger.ack(gids)
            with timer.phase("save"):
                self._write(batch + 1, groups)
            state.store.delete(gids)
            self._record(batch + 1, groups, timer)
            state.budget.count_trained()
            state.budget.count_published(state.budget.trained)
            state.changed.notify()

    def _write(self, step: int, groups: Sequence[Group]) -> None:
        try:
            self.batches.write(step, groups, {"ledger": self.state.ledger.snapshot()})
        except OSError as error:
            raise RunError(f"step {step}: its groups cannot be written: {error}") from error

    def _record(self, step: int, groups: Sequence[Group], timer: PhaseTimer) -> None:
        run, samples = self.open, [sample for group in groups for sample in group.samples]
        num_tokens = sum(len(sample.ids) for sample in samples)
        phases = timer.phases_ms()
        wall_ms = sum(phases.values())
        record = StepRecord(
            step=step,
            epoch=(step - 1) // run.steps_per_epoch,
            version=0,
            time_s=time.time(),
            num_groups=len(groups),
            num_samples=len(samples),
            num_tokens=num_tokens,
            tokens_per_sec=num_tokens / wall_ms * 1e3 if wall_ms else None,
            wall_clock_ms=wall_ms,
            phases=phases,
            rl=Rl(
                **sample_metrics(groups),
                reward_parts=mean_parts(groups),
                prompt_length_mean=sum(len(g.prompt.ids) for g in groups) / len(groups),
                staleness=None,
            ),
            funnel=Funnel(**asdict(self.state.ledger.funnel())),
        )
        run.recorder.step(record, groups)


def first_weights(config: Config, device: torch.device) -> Snapshot:
    """What the actor begins with, as samplers on this device get it; read on the CPU."""
    path, weights = model_folder(config), weights_folder(config, "actor")
    dtype = config.actor.compute_dtype(device.type)
    engine = build_engine(
        path,
        EngineSettings(model=ModelConfig(dtype=dtype, param_dtype=config.actor.param_dtype)),
        init_from_scratch=weights is None,
        seed=config.seed,
        weights=weights,
        backend=backend_of(config, "actor"),
    )
    return take_snapshot(0, engine.iter_weights(), copy=True)
