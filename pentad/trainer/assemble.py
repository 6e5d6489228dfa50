"""Wires a run: from a checked config to pumps that turn."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from pentad.checkpoint.folders import Checkpoint, reading
from pentad.config.derived import snapshot_on_host
from pentad.config.rules.unread import unread
from pentad.config.schema import Config
from pentad.core.algorithms import AlgorithmSettings
from pentad.core.errors import RunError
from pentad.core.roles import Learner, Sampler
from pentad.core.types import Group, SamplingParams
from pentad.data.ledger import Ledger
from pentad.data.packing import unpack_groups
from pentad.data.store import MemoryStore
from pentad.rewards.scorer import RewardScorer
from pentad.rl.bounds import Bounds
from pentad.rl.shaping import has_signal
from pentad.rollout.evaluation import EvalResult
from pentad.rollout.executor import Executor
from pentad.runtime.lead import Lead
from pentad.sync.publisher import Publisher, take_snapshot
from pentad.telemetry.log import announced
from pentad.trainer.budget import Budget
from pentad.trainer.evaluate import open_reward
from pentad.trainer.evaluator import Evaluator
from pentad.trainer.learners import build_learner, build_update, load_tags, size_of
from pentad.trainer.placement import Placement, Turnstile
from pentad.trainer.preflight import Checked, check_train, kind_of
from pentad.trainer.probing import Prober
from pentad.trainer.publish_pump import PublishPump
from pentad.trainer.ranks import layout_of, run_over_ranks
from pentad.trainer.recovery import GROUPS, Identity, save_after_failure
from pentad.trainer.rollout_pump import RolloutPump
from pentad.trainer.run import (
    OpenRun,
    RunSummary,
    count_steps,
    open_run,
    repeat_warnings,
    standing,
)
from pentad.trainer.samplers import open_samplers
from pentad.trainer.scheduler import Scheduler
from pentad.trainer.selftest import NUM_PROBES, run_selftest, tolerance_of
from pentad.trainer.sft import run_sft
from pentad.trainer.start import Role, start_run
from pentad.trainer.state import RunState
from pentad.trainer.stopping import StopFlag, cut_short, stop_flag, stop_task_early
from pentad.trainer.train_pump import LearnerThread, TrainedBatch, TrainPump
from pentad.trainer.translate import (
    bounds_of,
    compute_dtype,
    eval_params,
    executor_settings,
    sampling_params,
)
from pentad.trainer.watchdog import Watchdog

__all__ = ["run_sft", "run_train"]

log = logging.getLogger(__name__)


def run_train(
    config: Config, notes: Sequence[str] = (), fresh: bool = False, device: str = "auto"
) -> RunSummary:
    """Reinforcement learning from start to end; returns where everything is."""
    return run_over_ranks(lead_train, begin_train, config, notes, fresh, device)


def begin_train(config: Config, device: torch.device) -> Checked:
    """What must be done before anything else is, on any rank."""
    checked = check_train(config, device)
    start_run(config, ("actor", "critic") if checked.algorithm.needs_critic else ("actor",))
    return checked


def lead_train(lead: Lead, config: Config, notes: Sequence[str], fresh: bool) -> RunSummary:
    """The run, on rank 0 or alone."""
    checked = begin_train(config, lead.device)
    steps_per_epoch = checked.stream.steps_per_epoch(config.train_dataset.batch_size)
    num_steps = count_steps(config, steps_per_epoch)
    with open_run(
        config,
        [*notes, checked.stream.summary()],
        warnings=[
            *unread(config, "train"),
            *checked.stream.warnings,
            *repeat_warnings(config.train_dataset.batch_size, len(checked.stream)),
        ],
        title=f"{config.algorithm.name} {config.experiment_name}/{config.trial_name}",
        fresh=fresh,
        dims=checked.dims,
        device=lead.device,
        layout=layout_of(config, "actor"),
        num_steps=num_steps,
        steps_per_epoch=steps_per_epoch,
    ) as run:
        roles = ("default", "critic") if checked.algorithm.needs_critic else ("default",)
        if done := run.finished(num_steps, roles=roles, evaluates=checked.valid is not None):
            return done
        return asyncio.run(Assembly(config, checked, run, lead, num_steps).run())


class Assembly:
    """The parts of one RL run; all but the learners' further ranks in this process."""

    def __init__(
        self, config: Config, checked: Checked, run: OpenRun, lead: Lead, num_steps: int
    ) -> None:
        self.config = config
        self.checked = checked
        self.open = run
        self.lead = lead
        self.device = lead.device
        self.num_steps = num_steps
        self.size = size_of(config, checked, num_steps)
        self.params = sampling_params(config, checked.tokenizer)
        self.placement = Placement(
            is_shared=config.mode == "colocate",
            max_staleness=config.max_staleness,
            snapshots_on_host=snapshot_on_host(config, kind_of(lead.device)),
            offload_rollout=bool(config.offload_rollout),
        )
        with announced(log, "making the model"):
            self.learner = self._learner("actor")
            self.critic = self._learner("critic") if checked.algorithm.needs_critic else None
        self.samplers: dict[str, Sampler] = {}
        self.turnstile = Turnstile(self.placement, [])
        self.publisher = Publisher([])
        self.state = RunState(
            Ledger(config.train_dataset.batch_size),
            MemoryStore(),
            Budget(config.train_dataset.batch_size, config.max_staleness, num_steps),
        )
        self.thread = LearnerThread()
        self.savers = [run.saver(self.learner)]
        learners = {"default": self.learner}
        if self.critic is not None:
            self.savers.append(run.saver(self.critic, "critic"))
            learners["critic"] = self.critic
        self.bounds = bounds_of(config)
        self.recover = run.recovery(learners, self.savers)
        self.batches = run.batches(self.size)
        self.recover.add("dataloader_info", "data", Identity(checked.stream.state))
        self.recover.add("stats_logger_info", "bounds", self.bounds)
        self.other_tags: set[str] = set()
        """Tags of the checkpoint that the config takes from elsewhere now."""
        self.unrecorded: TrainedBatch | None = None
        """A batch that is in the weights and not in the records."""
        self.update = build_update(config, checked.algorithm, self.learner, self.critic)

    async def run(self) -> RunSummary:
        with ExitStack() as stepping:
            try:
                evaluator = await self._train(stepping)
            except (Exception, asyncio.CancelledError) as error:
                if cut := self._cut_short(error):
                    raise cut from None
                if not self.thread.is_given_up:
                    self._rescue()
                raise
            trained = self.trained
            self.recover.finish()
            folders = [saver.finish(trained - 1) for saver in self.savers] if trained else [None]
        stop = StopFlag(self.state.stop_reason)
        stop.check_complete(trained, self.num_steps, folders[0], next_start=self.recover.next_start)
        assert folders[0] is not None, "a complete run has steps"
        evals = self.open.recorder.evaluations() if evaluator else []
        return RunSummary(self.open.folder.path, folders[0], trained, evals)

    def _rescue(self) -> None:
        """Saves and records what was trained before a failure, as far as that can be had."""
        update, late = self.update, self.unrecorded
        is_whole = not (update.num_moved or self.lead.is_torn)
        if late is not None and late.batch == update.num_done - 1 and is_whole:
            try:
                self._after_step(late)
            except Exception as error:  # the first failure is the one to be raised
                log.warning("after the failure: step %d is not recorded: %s", late.batch + 1, error)
        parts = self.lead, self.recover, self.savers
        save_after_failure(*parts, update.num_done, update.num_moved)

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
        saved = self.savers[0].good
        return cut_short(reason, self.trained + 1, saved, self.recover.next_start)

    async def _train(self, stepping: ExitStack) -> Evaluator | None:
        """Everything but the last save; signals are noted in `stepping` from the first step on."""
        async with AsyncExitStack() as stack:
            stack.callback(lambda: self.thread.close(self.config.stall_abort_s))
            with stop_task_early(partial(standing, self.config)):
                await self._open_samplers(stack)
                reward = await open_reward(self.config, self.config.train_dataset.answer_key, stack)
                evaluator = await self._evaluator(reward, stack)
                await self._begin(evaluator)
            # From here on what was trained is saved first, whoever asks to stop.
            stepping.enter_context(stop_flag())
            try:
                await self._scheduler(reward, evaluator, stack).run()
            except asyncio.CancelledError:
                self.thread.is_given_up = bool(self.state.stop_reason)
                raise
        return evaluator

    async def _open_samplers(self, stack: AsyncExitStack) -> None:
        self.samplers = await open_samplers(
            self.config,
            self.checked.dims,
            self.checked.tokenizer,
            self.device,
            self.open.folder.file("servers/"),
            stack,
        )
        self.turnstile = Turnstile(self.placement, list(self.samplers.values()))
        self.publisher = Publisher(list(self.samplers.values()))

    async def _begin(self, evaluator: Evaluator | None) -> None:
        """State, tags, the first publish, the self-test and the baseline, before the first step."""
        trained = await self.thread.run(self._resume)
        with announced(log, "self-test: sampler and trainer agree on log-probs"):
            await self.thread.run(self._load_tags)
            await self.thread.run(self.recover.prepare)
            snapshot = await self.thread.run(
                lambda: take_snapshot(
                    trained,
                    self.learner.iter_weights(),
                    copy=False,
                    on_host=self.placement.snapshots_on_host,
                )
            )
            digest = await self.publisher.publish(snapshot)
            found = await run_selftest(
                self.learner,
                list(self.samplers.values()),
                [prompt.ids for prompt in self.checked.stream.first(NUM_PROBES)],
                temperature=self.params.temperature,
                weights_digest=digest,
                tolerance=tolerance_of(
                    compute_dtype(self.config.actor, self.device), strict=self.config.strict
                ),
                seed=self.config.seed,
            )
        log.info("self-test passed: %s", found)
        self.open.started(
            trained,
            selftest=asdict(found),
            device=str(self.device),
            layout=str(layout_of(self.config, "actor")),
        )
        if evaluator is not None:
            done = self.open.recorder.evaluated()
            evaluator.asked = max(done, default=0)
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
        self.update.num_done = checkpoint.step + 1
        before, now = checkpoint.manifest.facts["config"], self.config
        paths = {"ref": now.ref.path, "teacher": now.teacher.path}
        self.other_tags = {tag for tag, path in paths.items() if before[tag]["path"] != path}
        for line in self.open.recorder.evaluations():  # one may have ended after the commit
            self._scored(line)
        return checkpoint.step + 1

    def _scored(self, line: Mapping[str, Any]) -> None:
        """An evaluation, as it is recorded."""
        score = line["reward_mean"] if line["accuracy"] is None else line["accuracy"]
        for saver in self.savers:
            saver.scored(line["version"] - 1, math.nan if score is None else score)

    def _load_tags(self) -> None:
        saved = self.recover.counters.get("default", {"tags": ()})["tags"]
        has = set(saved) - self.other_tags
        load_tags(self.learner, self.config, self.checked.algorithm, has, self.trained)

    def _scheduler(
        self, reward: RewardScorer | None, evaluator: Evaluator | None, stack: AsyncExitStack
    ) -> Scheduler:
        config, state = self.config, self.state
        executor = self._executor(self.params, config.gconfig.n_samples, "train", reward, stack)
        bounds = self.bounds
        publish = PublishPump(
            state,
            self.publisher,
            evaluator,
            self.placement,
            self.turnstile,
            self._prober(bounds),
        )
        train = TrainPump(
            state,
            self.learner,
            self.update,
            publish,
            self.placement,
            self.turnstile,
            self.thread,
            num_chunks=config.num_iters_per_train_update,
            ref_update_interval=config.ref_update_interval,
            bounds=bounds,
            before_step=lambda batch: self.lead.report(batch + 1),
            on_trained=self._note,
            after_step=self._after_step,
        )
        rollout = RolloutPump(
            state,
            self.checked.stream,
            executor,
            self.placement,
            self.turnstile,
            rejection(self.checked.algorithm),
            max_groups=config.rollout.max_concurrent_groups,
        )
        samplers = self.samplers.values()
        watchdog = Watchdog(
            state,
            warn_s=config.stall_warning_s,
            abort_s=config.stall_abort_s,
            sampled=lambda: sum(sampler.stats()["tokens_drawn"] for sampler in samplers),
            is_watched=self.lead.rank.board is not None,
        )
        return Scheduler(state, rollout, train, publish, watchdog)

    def _prober(self, bounds: Bounds) -> Prober | None:
        """On-policy the trained tokens themselves tell whether the one sampler is up to date."""
        if self.placement.is_on_policy and len(self.samplers) == 1:
            return None
        return Prober(
            list(self.samplers.values()),
            [prompt.ids for prompt in self.checked.stream.first(NUM_PROBES)],
            self.learner,
            self.thread.run,
            bounds,
            temperature=self.params.temperature,
            seed=self.config.seed,
        )

    def _note(self, trained: TrainedBatch) -> None:
        self.unrecorded = trained

    def _after_step(self, trained: TrainedBatch) -> None:
        self.unrecorded = None
        for step in [*trained.result.steps, *trained.result.critic_steps]:
            if step.skipped:
                log.warning("step %d: nothing was updated: %s", trained.batch + 1, step.reason)
        with trained.timer.phase("save"):
            for saver in self.savers:
                saver.after_step(trained.batch)
            self.recover.after_step(trained.batch, trained.progress)
        record = self.open.steps.rl_record(
            trained, self.checked.algorithm, self.savers[0], self.recover
        )
        self.batches.keep(record.step, trained.groups)
        self.open.recorder.step(record, trained.groups)
        self.recover.commit()

    def _learner(self, role: Role) -> Learner:
        return self.lead.build(role, build_learner, self.config, role, self.size)

    def _executor(
        self,
        params: SamplingParams,
        num_samples: int,
        purpose: str,
        reward: RewardScorer | None,
        stack: AsyncExitStack,
    ) -> Executor:
        settings = executor_settings(
            self.config, self.checked.dims, params, num_samples, purpose=purpose
        )
        tokenizer = self.checked.tokenizer.inner
        executor = Executor(self.samplers, self.checked.workflow, reward, settings, tokenizer)
        stack.callback(executor.close)
        return executor

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
            self._executor(
                eval_params(config, self.checked.tokenizer),
                config.evaluator.n_samples,
                "eval",
                reward,
                stack,
            ),
            self.open.frequency(config.evaluator),
            record,
            last_version=self.num_steps,
        )
        self.recover.add("evaluator_info", "evaluator", evaluator)
        return evaluator


def rejection(settings: AlgorithmSettings) -> Callable[[Group], str | None]:
    """Which groups are not worth training, and why."""

    def reject(group: Group) -> str | None:
        if settings.dynamic_filter and not has_signal([s.reward or 0.0 for s in group.samples]):
            return "no_signal"
        if not any(sample.mask.any() for sample in group.samples):
            return "nothing_sampled"
        return None

    return reject
