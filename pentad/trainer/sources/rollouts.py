"""Rollouts as the source of a run's batches: reinforcement learning.

Pumps on the run's event loop sample groups, score them and publish weights
(`trainer.pumps.scheduler`); the steps of the run lease the groups and train them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from pentad.checkpoint.folders import Checkpoint, reading
from pentad.config.load import record_values, with_hub_names
from pentad.config.schema import Config
from pentad.config.topology import scorers
from pentad.core.errors import Problem, UserError
from pentad.core.roles import Sampler
from pentad.core.sizes import RunSize
from pentad.data.ledger import Ledger
from pentad.data.packing import unpack_groups
from pentad.data.store import BlobStore
from pentad.infer.sampler import EmbeddedSampler
from pentad.rollout.evaluation import EvalResult
from pentad.sync.publisher import Snapshot
from pentad.telemetry.log import announced
from pentad.telemetry.record import MemoryUse, PhaseTimer, StepRecord
from pentad.trainer.context import RunSummary
from pentad.trainer.preflight import Checked, check_train, kind_of, size_of
from pentad.trainer.processes.ranks import run_over_ranks
from pentad.trainer.pumps.oversampling import Oversampling
from pentad.trainer.pumps.rollout_pump import RolloutPump, rejection
from pentad.trainer.pumps.scheduler import Scheduler, Watchdog
from pentad.trainer.pumps.scorers import RefreshedReference, ScorePump, ScorerClient, open_scorers
from pentad.trainer.pumps.state import Budget, RunState
from pentad.trainer.pumps.train_pump import BatchTrainer, PublishPump
from pentad.trainer.rank.learners import roles_of, start_run
from pentad.trainer.rank.service import LearnerService
from pentad.trainer.records import TrainedBatch
from pentad.trainer.resume import replaced_weights
from pentad.trainer.run import BatchSource, Run, RunInputs
from pentad.trainer.run_folders import oldest_saved
from pentad.trainer.sampling.evaluate import Evaluator, Scorers, open_executors
from pentad.trainer.sampling.placement import Placement
from pentad.trainer.sampling.sampler_side import SamplerSide, open_group_store, open_sampler_side
from pentad.trainer.sampling.selftest import (
    NUM_PROBES,
    Prober,
    tolerance_of,
)
from pentad.trainer.saving.batches import BatchKeeper
from pentad.trainer.saving.recovery import GROUPS, Identity

log = logging.getLogger(__name__)


def run_train(
    config: Config, notes: Sequence[str] = (), fresh: bool = False, device: str = "auto"
) -> RunSummary:
    """Runs reinforcement learning from start to end; returns the summary of the run."""
    assert config.only is None, "a rollout-only or train-only run has another source"
    return run_over_ranks(begin_train, LearnerService, config, notes, fresh, device)


def begin_train(config: Config, device: torch.device) -> RunInputs:
    """Preparations before anything else, on any rank."""
    checked = check_train(config, device)
    roles = roles_of(config)
    start_run(config, roles)
    return RunInputs(
        command="train",
        title=config.algorithm.name,
        dims=checked.dims,
        data=checked.stream,
        roles=roles,
        evaluates=checked.valid is not None,
        open=partial(open_rollouts, checked),
    )


async def open_rollouts(checked: Checked, run: Run, stack: AsyncExitStack) -> RolloutSource:
    config = run.config
    batch_size = config.train_dataset.batch_size
    size = size_of(config, checked, run.num_steps)
    placement = Placement(
        is_shared=config.mode == "colocate",
        max_staleness=config.max_staleness,
        snapshots_on_host=config.snapshot_on_host(kind_of(run.learner.device)),
        offload_rollout=bool(config.offload_rollout),
        offload_train=bool(config.offload_train),
    )
    store = open_group_store(run, checked)
    state = RunState(
        Ledger(batch_size, has_scorers=bool(scorers(config))),
        store,
        Budget(
            *(batch_size, config.max_staleness, run.num_steps),
            max_carries=config.rollout.max_carries if config.oversamples else 0,
        ),
        stop=run.stop,
    )

    def build() -> None:
        run.build(**asdict(size))
        if isinstance(store, BlobStore):  # else it is in the memory of the learners
            run.learner.call_all("open_store", address=store.address)

    side = await open_sampler_side(run, checked, placement, stack, build)
    rewards = Scorers(stack)
    evaluator = await open_evaluator(run, checked, side, rewards, stack)
    models = await open_scorers(run, store, size.max_row_tokens, stack)
    if placement.offload_train:
        await side.device_turns.enter("actor")
    run.recover.add("dataloader_info", "data", Identity(checked.stream.state))
    reference = reference_of(run, models, size)
    prober = prober_of(run, checked, side)
    publish = PublishPump(
        *(state, side.publisher, evaluator, side.device_turns),
        prober=prober,
        find_cause=run.learner.find_cause,
    )
    num_chunks = config.num_iters_per_train_update
    is_open = reference.scores if reference else lambda batch: True
    score = ScorePump(state, models, num_chunks=num_chunks, is_open=is_open)
    executor = await open_executors(checked, side.samplers, rewards, stack, purpose="train")
    scheduler = Scheduler(
        state.request_stop,
        watchdog_of(run, state, side.samplers),
        RolloutPump(
            *(state, checked.stream, executor, side.device_turns, rejection(config.algorithm)),
            max_groups=config.rollout.max_concurrent_groups,
            oversampling=oversampling_of(config, state, side.samplers),
        ),
        publish,
        score if models else None,
    )
    return RolloutSource(
        run=run,
        checked=checked,
        state=state,
        side=side,
        prober=prober,
        evaluator=evaluator,
        reference=reference,
        scheduler=scheduler,
        trainer=BatchTrainer(state, run.learner, publish, side.device_turns, num_chunks),
        batches=run.context.batch_keeper(size),
        saves_first=placement.offload_train,  # the learner leaves when samplers wake
    )


def draws_alike(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether an answer started under one config may be continued under the other."""
    routes = "replay_routes"
    is_same = before["rollout"].get(routes) == now["rollout"][routes]
    return bool(is_same and before["gconfig"] == now["gconfig"])


def oversampling_of(
    config: Config, state: RunState, samplers: Mapping[str, Sampler]
) -> Oversampling | None:
    if not config.oversamples:
        return None
    oversampling = Oversampling(state, config.groups_started)
    only, *others = samplers.values()
    if isinstance(only, EmbeddedSampler) and not others:
        oversampling.hold = only.hold_after
    return oversampling


def watchdog_of(run: Run, state: RunState, samplers: Mapping[str, Sampler]) -> Watchdog:
    return Watchdog(
        state,
        warn_s=run.config.stall_warning_s,
        abort_s=run.config.stall_abort_s,
        sampled=lambda: sum(sampler.stats()["tokens_drawn"] for sampler in samplers.values()),
        is_watched=run.learner.is_remote,
        check=run.learner.check,
        show=run.context.recorder.progress,
    )


def prober_of(run: Run, checked: Checked, side: SamplerSide) -> Prober:
    samplers = list(side.samplers.values())
    # On-policy, the trained tokens show whether a single sampler is up to date.
    is_probed = run.config.max_staleness > 0 or len(samplers) > 1
    return Prober(
        samplers=samplers,
        prompts=[prompt.ids for prompt in checked.stream.first(NUM_PROBES)],
        learner=run.learner,
        temperature=run.config.gconfig.temperature,
        seed=run.config.seed,
        bounds=run.bounds if is_probed else None,
    )


def reference_of(
    run: Run, models: Mapping[str, ScorerClient], size: RunSize
) -> RefreshedReference | None:
    """Returns the reference, if it has separate devices and is refreshed."""
    if "ref" not in models or not run.config.ref_update_interval:
        return None
    return RefreshedReference(
        models["ref"],
        run.learner,
        run.context.folder.file("reference/").absolute(),
        run.config.ref_update_interval,
        size.max_row_tokens,
        lambda: oldest_saved(run.config),
    )


async def open_evaluator(
    run: Run,
    checked: Checked,
    side: SamplerSide,
    rewards: Scorers,
    stack: AsyncExitStack,
) -> Evaluator | None:
    valid, config = checked.valid, run.config
    if valid is None:
        return None

    def record(result: EvalResult) -> None:
        note_score(run, result.as_record())
        run.context.recorder.evaluation(result.as_record())

    evaluator = Evaluator(
        [valid.prompt(gid) for gid in range(len(valid))],
        await open_executors(checked, side.samplers, rewards, stack, purpose="eval"),
        run.context.frequency(config.evaluator),
        record,
        last_version=run.num_steps,
    )
    run.recover.add("evaluator_info", "evaluator", evaluator)
    return evaluator


def note_score(run: Run, line: Mapping[str, Any]) -> None:
    """Passes a score to the savers. `line`: the record of an evaluation."""
    score = line["reward_mean"] if line["accuracy"] is None else line["accuracy"]
    for saver in run.savers.values():
        saver.scored(line["version"] - 1, math.nan if score is None else score)


@dataclass(eq=False, kw_only=True)
class RolloutSource(BatchSource):
    """Batches of groups that are sampled while the learner trains."""

    run: Run
    checked: Checked
    state: RunState
    side: SamplerSide
    prober: Prober
    evaluator: Evaluator | None
    reference: RefreshedReference | None
    scheduler: Scheduler
    trainer: BatchTrainer
    batches: BatchKeeper
    saves_first: bool

    # Before the first step

    def check(self, checkpoint: Checkpoint) -> None:
        recover, stream = self.run.recover, self.checked.stream
        data = {"train_dataset", "rollout.workflows"}
        is_forced = bool(data.intersection(self.run.config.recover.allow))
        place, info = checkpoint.root / checkpoint.info, recover.infos["dataloader_info"]
        known = recover.data_state(checkpoint, "data")
        if not is_forced:
            stream.check_state(known)
        ready = None if is_forced else recover.ready
        with reading(place / GROUPS):
            groups = [] if ready is None else list(unpack_groups(bytearray(ready), stream.prompt))
        with reading(place / "dataloader_info.json"):
            self.state.resume(
                *(info["ledger"], groups, checkpoint.step + 1),
                continues=draws_alike(
                    with_hub_names(checkpoint.manifest.facts["config"]),
                    record_values(self.run.config),
                ),
                needs_greedy=self.run.config.samples_greedily,
            )

    def restored(self, checkpoint: Checkpoint | None) -> None:
        """Loads frozen weights for scoring that the checkpoint does not contain."""
        run = self.run
        self.batches.forget(after=run.trained)
        if checkpoint is None:
            super().restored(checkpoint)
            return
        before, now = with_hub_names(checkpoint.manifest.facts["config"]), run.config
        replaced = replaced_weights(checkpoint, now)
        keeps_ref = before["mode"] == "async" and bool(before["algorithm"]["kl_coef"])
        every = before["ref_update_interval"]
        if keeps_ref and every and now.mode != "async" and run.trained >= every:
            rule = f"the reference was refreshed on its own devices (ref_update_interval = {every})"
            raise UserError(Problem(f"mode = {now.mode}", rule, "continue in mode: async"))
        for line in run.context.recorder.evaluations():  # one may have ended after the commit
            note_score(run, line)
        run.learner.call_all(
            "load_tags",
            has=sorted(run.recover.tags - replaced),
            step=run.trained,
            keeps_ref=keeps_ref and "ref" not in replaced,
        )

    async def begin(self) -> None:
        """Runs the first publish, the self-test and the baseline evaluation."""
        run, config, trained = self.run, self.run.config, self.run.trained
        if self.reference is not None:
            await self.reference.resume(trained)
        adapter = None
        with announced(log, "self-test: sampler and trainer agree on log-probs"):
            snapshot = await self._publish(trained)
            if config.actor.lora is not None:
                adapter = await self.prober.check_adapter(partial(self._publish, trained))
            dtype = config.actor.compute_dtype(run.learner.device.type)
            found = await self.prober.selftest(
                snapshot.digest.hex(),
                tolerance_of(
                    dtype,
                    strict=config.strict,
                    cache_dtype=config.rollout.kv_cache_dtype,
                    weight_dtype=config.rollout.weight_dtype,
                ),
                stall_s=config.stall_abort_s,
                packing=tolerance_of(dtype, strict=config.strict),
            )
        log.info("self-test passed: %s%s", found, f", {adapter}" if adapter else "")
        tested = asdict(found) | ({"adapter": asdict(adapter)} if adapter else {})
        run.context.started(trained, selftest=tested, layout=str(run.context.layout))
        if self.evaluator is not None:
            done = run.context.recorder.evaluated()
            self.evaluator.seen = max(done, default=0)
            if self.evaluator.is_due(trained) and trained not in done:
                with announced(log, f"evaluation of version {trained}, before the next step"):
                    await self.evaluator.evaluate(trained)

    async def _publish(self, version: int) -> Snapshot:
        """Publishes the weights to all samplers, before any step."""
        snapshot = await self.side.snapshot_weights(
            version, copy=self.side.device_turns.placement.offload_train
        )
        await self.side.device_turns.enter("rollout")
        await self.side.publisher.publish(snapshot)
        return snapshot

    # Steps

    async def drive(self, steps: Coroutine[Any, Any, None]) -> None:
        await self.scheduler.run(steps)

    def doing(self, what: str) -> AbstractContextManager[None]:
        return self.state.doing(what)

    async def train(self, step: int, timer: PhaseTimer) -> TrainedBatch | None:
        trained = await self.trainer.train(step, timer)
        if trained is not None:
            self.state.budget.count_trained()
        return trained

    async def after_update(self, trained: TrainedBatch) -> None:
        """Refreshes the reference with the actor's weights if that is due."""
        version, every = trained.batch + 1, self.run.config.ref_update_interval
        if every is None or version % every:
            return
        with self.doing(f"the reference after step {version}"):
            if self.reference is None:
                await self.run.learner.call("save_tag", tag="ref")
            else:
                await self.reference.refresh(version)

    async def take_weights(self, version: int, timer: PhaseTimer) -> Snapshot:
        with timer.phase("publish"), self.doing(f"the copy of version {version}"):
            return await self.side.snapshot_weights(version)

    def publish(self, snapshot: Snapshot, timer: PhaseTimer) -> Coroutine[Any, Any, None]:
        return self.trainer.publish.submit(snapshot, timer)

    def record(self, trained: TrainedBatch) -> StepRecord:
        run = self.run
        with trained.timer.phase("record"):
            metrics = run.learner.query("batch_metrics")
            trained.facts = replace(trained.facts, metrics=metrics)
        turns = dict(self.side.device_turns.turns_gb) or None
        memory = MemoryUse(**run.learner.query("memory"), turns_gb=turns)
        times = self.side.publisher.times
        return run.context.steps.record(trained, memory, run.saver, run.recover, times)
