"""Wires a run: from a checked config to pumps that turn."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch

from pentad.checkpoint.folders import Checkpoint, reading
from pentad.config.derived import snapshot_on_host
from pentad.config.schema import Config
from pentad.config.topology import scorers
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.sizes import RunSize
from pentad.data.ledger import Ledger
from pentad.data.packing import unpack_groups
from pentad.data.store import BlobStore
from pentad.rewards.scorer import RewardScorer
from pentad.rl.bounds import Bounds
from pentad.rollout.evaluation import EvalResult
from pentad.rollout.executor import Executor
from pentad.telemetry.log import announced
from pentad.telemetry.record import MemoryUse
from pentad.trainer.crew import Crew, Regroup
from pentad.trainer.evaluate import Evaluator, open_executor, open_reward
from pentad.trainer.learner_thread import Calls, LearnerThread
from pentad.trainer.learners import start_run
from pentad.trainer.placement import Placement
from pentad.trainer.preflight import Checked, check_train, kind_of, size_of
from pentad.trainer.ranks import run_over_ranks
from pentad.trainer.recovery import (
    GROUPS,
    Identity,
    finish_saves,
    progress_of,
    save_after_failure,
)
from pentad.trainer.rollout_pump import RolloutPump, rejection
from pentad.trainer.run import OpenRun, RunSummary, open_run
from pentad.trainer.run_folders import oldest_saved, standing
from pentad.trainer.sampler_side import open_group_store, open_sampler_side
from pentad.trainer.scheduler import Scheduler, Watchdog
from pentad.trainer.scorers import RefreshedReference, ScorePump, open_scorers
from pentad.trainer.selftest import NUM_PROBES, Prober, run_selftest, tolerance_of
from pentad.trainer.service import LearnerService
from pentad.trainer.sft import run_sft
from pentad.trainer.state import Budget, RunState
from pentad.trainer.stopping import StopFlag, cut_short, stop_flag, stop_task_early
from pentad.trainer.train_pump import PublishPump, TrainedBatch, TrainPump
from pentad.trainer.translate import sampling_params

__all__ = ["run_sft", "run_train"]

log = logging.getLogger(__name__)


def run_train(
    config: Config, notes: Sequence[str] = (), fresh: bool = False, device: str = "auto"
) -> RunSummary:
    """Reinforcement learning from start to end; returns where everything is."""
    assert config.only is None, "trainer.rollout_only and trainer.train_only are for one side"
    return run_over_ranks(lead_train, LearnerService, begin_train, config, notes, fresh, device)


def begin_train(config: Config, device: torch.device) -> Checked:
    """What must be done before anything else is, on any rank."""
    checked = check_train(config, device)
    start_run(config, ("actor", "critic") if checked.algorithm.needs_critic else ("actor",))
    return checked


def lead_train(
    calls: Calls, config: Config, notes: Sequence[str], fresh: bool, crew: Crew
) -> RunSummary:
    """The run, beside its learners, on rank 0 or alone."""
    checked: Checked = crew.checked or begin_train(config, calls.device)
    with open_run(
        config,
        notes,
        checked.stream,
        title=config.algorithm.name,
        fresh=fresh,
        dims=checked.dims,
        device=calls.device,
    ) as run:
        roles = ("default", "critic") if checked.algorithm.needs_critic else ("default",)
        if done := run.finished(roles=roles, evaluates=checked.valid is not None):
            return done
        return crew.runner.run(Assembly(checked, run, calls, crew).run())


class Assembly:
    """The parts of one RL run over one life of its learners."""

    def __init__(self, checked: Checked, run: OpenRun, calls: Calls, crew: Crew) -> None:
        self.config = config = run.config
        self.checked = checked
        self.open = run
        self.calls = calls
        self.crew = crew
        self.device = calls.device
        self.num_steps = num_steps = run.num_steps
        self.params = sampling_params(config, checked.tokenizer)
        self.placement = Placement(
            is_shared=config.mode == "colocate",
            max_staleness=config.max_staleness,
            snapshots_on_host=snapshot_on_host(config, kind_of(self.device)),
            offload_rollout=bool(config.offload_rollout),
            offload_train=bool(config.offload_train),
        )
        size = size_of(config, checked, num_steps)
        self.store = open_group_store(run, checked, calls, crew)
        if not calls.is_apart:  # beside others it is built while samplers start
            self._build(size)
        self.size = size
        self.state = RunState(
            Ledger(config.train_dataset.batch_size, has_scorers=bool(scorers(config))),
            self.store,
            Budget(config.train_dataset.batch_size, config.max_staleness, num_steps),
        )
        self.learner = LearnerThread(calls)
        folders = ("default", "critic") if checked.algorithm.needs_critic else ("default",)
        self.savers = {folder: run.saver(calls, folder) for folder in folders}
        self.bounds = Bounds(config.guards)
        self.recover = run.recovery(calls, self.savers)
        self.batches = run.batches(size)
        self.recover.add("dataloader_info", "data", Identity(checked.stream.state))
        self.recover.add("stats_logger_info", "bounds", self.bounds)
        self.other_tags: set[str] = set()
        """Tags of the checkpoint that the config takes from elsewhere now."""
        self.keeps_ref = False
        """Whether a scorer was the reference of the checkpoint."""
        self.reference: RefreshedReference | None = None
        self.stop = StopFlag()
        """Signals since the first step that no pump has taken."""
        self.unrecorded: TrainedBatch | None = None
        """A batch that is in the weights and not in the records."""

    def _build(self, size: RunSize) -> None:
        self.open.build(self.calls, **asdict(size))
        if isinstance(self.store, BlobStore):
            self.calls.call("open_store", address=self.store.address)

    async def run(self) -> RunSummary:
        with ExitStack() as stepping:
            try:
                evaluator = await self._train(stepping)
            except (Exception, asyncio.CancelledError) as error:
                if cut := self._cut_short(error):
                    raise cut from None
                if not self.learner.is_given_up and not isinstance(error, Regroup):
                    self._rescue()
                raise
            trained, stop, savers = self.trained, self.stop, list(self.savers.values())
            stop.reason = stop.reason or self.state.stop_reason
            try:
                folders = finish_saves(self.recover, savers, trained, stop)
            except KeyboardInterrupt:
                good, next_start = self.savers["default"].good, self.recover.next_start
                raise cut_short(stop.reason, None, good, next_start) from None
        stop.check_complete(trained, self.num_steps, folders[0], next_start=self.recover.next_start)
        assert folders[0] is not None, "a complete run has steps"
        evals = self.open.recorder.evaluations() if evaluator else []
        return RunSummary(self.open.folder.path, folders[0], trained, evals)

    def _rescue(self) -> None:
        """Saves and records what was trained before a failure, as far as that can be had."""
        late, (num_done, num_moved) = self.unrecorded, progress_of(self.calls, self.trained)
        is_whole = not (num_moved or self.calls.is_torn)
        if late is not None and late.batch == num_done - 1 and is_whole:
            try:
                self._after_step(late)
            except Exception as error:  # the first failure is the one to be raised
                log.warning("after the failure: step %d is not recorded: %s", late.batch + 1, error)
        savers = list(self.savers.values())
        save_after_failure(self.calls, self.recover, savers, self.stop, num_done, num_moved)

    @property
    def trained(self) -> int:
        return self.state.budget.trained

    def _cut_short(self, error: BaseException) -> RunError | None:
        """A second signal cancels this task, and nothing is waited for. A loop that was held too
        long cancels it as well, and then what was trained is saved."""
        reason, task = self.state.stop_reason, asyncio.current_task()
        if not (reason and task is not None and isinstance(error, asyncio.CancelledError)):
            return None
        task.uncancel()
        saved = self.savers["default"].good
        return cut_short(reason, self.trained + 1, saved, self.recover.next_start)

    async def _train(self, stepping: ExitStack) -> Evaluator | None:
        """Everything but the last save; signals are noted in `stepping` from the first step on."""
        async with AsyncExitStack() as stack:
            stack.callback(lambda: self.learner.close(self.config.stall_abort_s))
            with stop_task_early(partial(standing, self.config)):
                self.side = await open_sampler_side(
                    self.open,
                    self.checked,
                    self.learner,
                    self.crew,
                    self.placement,
                    stack,
                    build=lambda: self._build(self.size),
                )
                reward = await open_reward(self.config, self.config.train_dataset.answer_key, stack)
                evaluator = await self._evaluator(reward, stack)
                self.scorers = await open_scorers(
                    self.config,
                    self.store,
                    self.size.max_row_tokens,
                    self.device,
                    stack,
                    log_folder=self.open.folder.file("ranks/") if self.calls.is_apart else None,
                    runtime=self.crew.runtime,
                )
                await self._begin(evaluator)
            # From here on what was trained is saved first, whoever asks to stop.
            self.stop = stepping.enter_context(stop_flag())
            self.calls.is_leaving = lambda: bool(self.state.stop_reason)
            try:
                await self._scheduler(reward, evaluator, stack).run()
            except asyncio.CancelledError:
                self.learner.is_given_up = bool(self.state.stop_reason)
                raise
        return evaluator

    async def _begin(self, evaluator: Evaluator | None) -> None:
        """State, tags, the first publish, the self-test and the baseline, before the first step."""
        if self.placement.offload_train:
            await self.side.turnstile.enter("actor")
        trained = await self.learner.run(self._resume)
        if "ref" in self.scorers and self.config.ref_update_interval:
            self.reference = RefreshedReference(
                self.scorers["ref"],
                self.learner,
                self.open.folder.file("reference/").absolute(),
                self.config.ref_update_interval,
                self.size.max_row_tokens,
                lambda: oldest_saved(self.config),
            )
            await self.reference.resume(trained)
        with announced(log, "self-test: sampler and trainer agree on log-probs"):
            await self.learner.run(self._load_tags)
            await self.learner.run(self.recover.prepare)
            self.crew.note_loaded()
            snapshot = await self.side.snapshot_weights(trained, copy=self.placement.offload_train)
            await self.side.turnstile.enter("rollout")
            await self.side.publisher.publish(snapshot)
            found = await run_selftest(
                self.learner,
                list(self.side.samplers.values()),
                [prompt.ids for prompt in self.checked.stream.first(NUM_PROBES)],
                temperature=self.params.temperature,
                weights_digest=snapshot.digest.hex(),
                tolerance=tolerance_of(
                    self.config.actor.compute_dtype(self.device.type),
                    strict=self.config.strict,
                    cache_dtype=self.config.rollout.kv_cache_dtype,
                ),
                seed=self.config.seed,
            )
        log.info("self-test passed: %s", found)
        self.open.started(trained, selftest=asdict(found), layout=str(self.open.layout))
        if evaluator is not None:
            done = self.open.recorder.evaluated()
            evaluator.seen = max(done, default=0)
            if evaluator.is_due(trained) and trained not in done:
                with announced(log, f"evaluation of version {trained}, before the next step"):
                    await evaluator.evaluate(trained)

    def _resume(self) -> int:
        """Goes on where the run stopped; how many batches are in the weights."""
        stream = self.checked.stream
        is_forced = "train_dataset" in self.config.recover.allow

        def take_data(checkpoint: Checkpoint) -> None:
            place, info = checkpoint.root / checkpoint.info, self.recover.infos["dataloader_info"]
            with reading(place / "dataloader_info.json"):
                known = dict(info["data"])
            if not is_forced:
                stream.check_state(known)
            data = None if is_forced else self.recover.ready
            with reading(place / GROUPS):
                groups = [] if data is None else list(unpack_groups(bytearray(data), stream.prompt))
            with reading(place / "dataloader_info.json"):
                self.state.resume(info["ledger"], groups, checkpoint.step + 1)

        checkpoint = self.open.resume(self.recover, take_data)
        self.batches.forget(after=0 if checkpoint is None else checkpoint.step + 1)
        if checkpoint is None:
            return 0
        before, now = checkpoint.manifest.facts["config"], self.config
        paths = {"ref": now.ref.path, "teacher": now.teacher.path}
        self.other_tags = {tag for tag, path in paths.items() if before[tag]["path"] != path}
        self.keeps_ref = before["mode"] == "async" and bool(before["algorithm"]["kl_coef"])
        every = before["ref_update_interval"]
        if self.keeps_ref and every and now.mode != "async" and checkpoint.step + 1 >= every:
            rule = (
                f"the reference was refreshed on devices of its own (ref_update_interval = {every})"
            )
            raise UserError(Problem(f"mode = {now.mode}", rule, "go on in mode: async"))
        for line in self.open.recorder.evaluations():  # one may have ended after the commit
            self._scored(line)
        return checkpoint.step + 1

    def _scored(self, line: Mapping[str, Any]) -> None:
        """An evaluation, as it is recorded."""
        score = line["reward_mean"] if line["accuracy"] is None else line["accuracy"]
        for saver in self.savers.values():
            saver.scored(line["version"] - 1, math.nan if score is None else score)

    def _load_tags(self) -> None:
        saved = self.recover.counters.get("default", {"tags": ()})["tags"]
        has = sorted(set(saved) - self.other_tags)
        keeps_ref = self.keeps_ref and "ref" not in self.other_tags
        self.calls.call("load_tags", has=has, step=self.trained, keeps_ref=keeps_ref)

    def _scheduler(
        self, reward: RewardScorer | None, evaluator: Evaluator | None, stack: AsyncExitStack
    ) -> Scheduler:
        config, state = self.config, self.state
        executor = self._executor(reward, stack, "train")
        publish = PublishPump(
            state,
            self.side.publisher,
            evaluator,
            self.placement,
            self.side.turnstile,
            self._prober(),
            self.calls.check if self.calls.is_apart else None,
        )
        train = TrainPump(
            state,
            self.learner,
            self.side.snapshot_weights,
            publish,
            self.placement,
            self.side.turnstile,
            num_chunks=config.num_iters_per_train_update,
            refresh=self._refresh,
            bounds=self.bounds,
            on_trained=self._note,
            after_step=self._after_step,
            go_back=partial(self.open.go_back, self.recover, self.bounds),
        )
        rollout = RolloutPump(
            state,
            self.checked.stream,
            executor,
            self.placement,
            self.side.turnstile,
            rejection(self.checked.algorithm),
            max_groups=config.rollout.max_concurrent_groups,
        )
        samplers = self.side.samplers.values()
        watchdog = Watchdog(
            state,
            warn_s=config.stall_warning_s,
            abort_s=config.stall_abort_s,
            sampled=lambda: sum(sampler.stats()["tokens_drawn"] for sampler in samplers),
            is_watched=self.calls.is_apart,
            check=self.calls.check,
            show=self.open.recorder.progress,
        )
        score = ScorePump(
            state,
            self.scorers,
            self.placement,
            num_chunks=config.num_iters_per_train_update,
            is_open=self.reference.scores if self.reference else lambda batch: True,
        )
        return Scheduler(state, rollout, train, publish, watchdog, score if self.scorers else None)

    async def _refresh(self, version: int) -> None:
        """Makes the reference the actor as it is, where that is due."""
        every = self.config.ref_update_interval
        if every is None or version % every:
            return
        if self.reference is None:
            await self.learner.call("save_tag", tag="ref")
        else:
            await self.reference.refresh(version)

    def _prober(self) -> Prober | None:
        """On-policy the trained tokens themselves show whether the one sampler is up to date."""
        if self.placement.is_on_policy and len(self.side.samplers) == 1:
            return None
        return Prober(
            samplers=list(self.side.samplers.values()),
            prompts=[prompt.ids for prompt in self.checked.stream.first(NUM_PROBES)],
            learner=self.learner,
            bounds=self.bounds,
            temperature=self.params.temperature,
            seed=self.config.seed,
        )

    def _note(self, trained: TrainedBatch) -> None:
        self.unrecorded = trained
        self.crew.note_step()

    def _after_step(self, trained: TrainedBatch) -> None:
        self.unrecorded = None
        for step in [*trained.facts.steps, *trained.facts.critic_steps]:
            if step.skipped:
                log.warning("step %d: nothing was updated: %s", trained.batch + 1, step.reason)
        with trained.timer.phase("save"):
            for saver in self.savers.values():
                saver.after_step(trained.batch)
            self.recover.after_step(
                trained.batch, trained.progress, is_doubtful=self.bounds.is_doubtful
            )
        turns = dict(self.side.turnstile.turns_gb) or None
        memory = MemoryUse(**self.calls.ask("memory"), turns_gb=turns)
        saver = self.savers["default"]
        times = self.side.publisher.times
        record = self.open.steps.rl_record(trained, memory, saver, self.recover, times)
        self.batches.keep(record.step, trained.groups)
        self.open.recorder.step(record, trained.groups)
        self.recover.commit()
        if record.step < self.num_steps:
            self.crew.regroup_if_due(self.recover, trained.batch)

    def _executor(
        self, reward: RewardScorer | None, stack: AsyncExitStack, purpose: Literal["train", "eval"]
    ) -> Executor:
        samplers = self.side.samplers
        return open_executor(self.config, self.checked, samplers, reward, stack, purpose=purpose)

    async def _evaluator(
        self, reward: RewardScorer | None, stack: AsyncExitStack
    ) -> Evaluator | None:
        valid, config = self.checked.valid, self.config
        if valid is None or config.valid_dataset is None:
            return None
        answer_key = config.valid_dataset.answer_key
        if answer_key != config.train_dataset.answer_key:
            reward = await open_reward(config, answer_key, stack)

        def record(result: EvalResult) -> None:
            self._scored(result.as_record())
            self.open.recorder.evaluation(result.as_record())

        evaluator = Evaluator(
            [valid.prompt(gid) for gid in range(len(valid))],
            self._executor(reward, stack, "eval"),
            self.open.frequency(config.evaluator),
            record,
            last_version=self.num_steps,
        )
        self.recover.add("evaluator_info", "evaluator", evaluator)
        return evaluator
