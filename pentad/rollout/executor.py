"""The executor: turns prompts into scored groups, with any number of sampler replicas.

A group depends only on its prompt, its attempt and the weights: seeds derive from the group's
identity, so a retry on another replica samples the same tokens. A group that fails is sampled again
a few times (`GroupRetries`), then dropped by the caller with a reason. No failure becomes a reward.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import cast

from pentad.core.errors import DataFailure, InfraFailure, Problem, RunError, UserError, first_cause
from pentad.core.roles import Scorer
from pentad.core.specs import load, why_not_loaded
from pentad.core.tasks import end
from pentad.core.types import Greedy, Group, Prompt, Sample
from pentad.data.section import VERIFIERS
from pentad.rewards.scorer import FAILED, reward_of_failed
from pentad.rollout.checks import check_samples
from pentad.rollout.drafts import Draft
from pentad.rollout.replicas import Candidate, CheckedSampler, Fleet
from pentad.rollout.retries import GroupRetries, ReplicaFailed
from pentad.rollout.section import RolloutConfig, workflow_kind
from pentad.rollout.workflows import (
    CLOSE_TIMEOUT_S,
    WORKFLOW_FAILED,
    Context,
    EpisodeOver,
    Episodes,
    OwnPrompts,
    SingleTurn,
    Workflow,
    contained,
)
from pentad.telemetry.timeline import timeline

log = logging.getLogger(__name__)

GRACE_S = 40.0
"""Time limit for a workflow to end after it was cancelled, in seconds; then it is abandoned. A
sampler may take `CUT_TIMEOUT_S` of them."""


class Executor:
    """Runs the workflow of each prompt on a replica, checks and scores its samples."""

    def __init__(
        self,
        fleet: Fleet,
        workflow: Workflow,
        reward: Scorer | None,
        context: Context,
        rollout: RolloutConfig,
        *,
        vocab_size: int,
        needs_reward: bool = True,
        needs_greedy: bool = False,
        max_infra_retries: int = 3,
    ) -> None:
        """`needs_reward`: a sample without a reward is an error. `needs_greedy`: each group also
        has the reward of a greedy answer. `max_infra_retries`: on other replicas, for each set of
        seeds."""
        self.fleet = fleet
        self.workflow = workflow
        self.reward = reward
        self.keys = rollout
        self.vocab_size = vocab_size
        self.needs_reward = needs_reward
        self.needs_greedy = needs_greedy
        self.max_infra_retries = max_infra_retries
        self.context = replace(
            context,
            deadline_s=rollout.deadline_s,
            tool_timeout_s=rollout.tool_timeout_s,
            rewrites_history=rollout.history == "template",
            has_scorer=reward is not None,
            show=self._show_once,
        )
        self.shown: set[str] = set()
        """Workflow errors, by type and code location, whose traceback has been logged."""

    async def rollout(self, prompt: Prompt, attempt: int, draft: Draft | None = None) -> Group:
        """Samples one group from its prompt, or from the tokens of an earlier step (`draft`).
        Raises DataFailure (drop the group) or InfraFailure (stop the run)."""
        draft = draft or Draft()
        retries = GroupRetries(self.keys.max_retries, self.max_infra_retries)
        while True:
            context = replace(self.context, attempt=retries.key(attempt), retries=retries)
            try:
                num = context.num_samples + self.needs_greedy
                async with self.fleet.pick(prompt, num) as replica:
                    samples, greedy = await self._sampled(prompt, context, draft, replica)
                group = await self._scored(Group(prompt, samples, attempt))
                if greedy:
                    group.greedy = await self._baseline(group, greedy)
                return group
            except (DataFailure, ReplicaFailed) as failure:
                retries.after(failure, prompt)
                if isinstance(failure, DataFailure):
                    draft.answers = ()

    def close(self) -> None:
        """Stops the health checks of suspect replicas, and the processes of environments. The
        samplers belong to the caller."""
        self.fleet.close()
        if callable(close := getattr(self.workflow, "close", None)):
            close()

    async def _sampled(
        self, prompt: Prompt, context: Context, draft: Draft, replica: Candidate
    ) -> tuple[list[Sample], list[Sample]]:
        """Returns the samples and those of the greedy episode, if needed, from one replica. If one
        of the two raises, so does the group; a failed greedy episode is kept, because each retry
        would repeat it."""
        draft.num_sampling = 0  # requests of a failed replica have no end
        sampler = CheckedSampler(replica, self.vocab_size, draft)
        if not self.needs_greedy:
            return await self._on(prompt, context, sampler), []
        params = replace(context.params, temperature=0.0)
        one = replace(context, num_samples=1, params=params, keeps_failed=True)
        greedy_sampler = CheckedSampler(replica, self.vocab_size, draft, is_greedy=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = tasks.create_task(self._on(prompt, context, sampler))
                greedy = tasks.create_task(self._on(prompt, one, greedy_sampler))
        except BaseExceptionGroup as failures:
            cause = first_cause(failures)
            raise cause from cause.__cause__
        return samples.result(), greedy.result()

    async def _on(self, prompt: Prompt, context: Context, sampler: CheckedSampler) -> list[Sample]:
        """Runs the workflow on one replica, within the deadline (`Episodes` enforce it
        themselves). One that does not end after it is cancelled is abandoned."""
        closing_s = 2 * CLOSE_TIMEOUT_S if isinstance(self.workflow, Episodes) else 0.0
        late = f"the group was not done after {self.keys.deadline_s} s"
        working = asyncio.ensure_future(contained(self.workflow.run(prompt, sampler, context)))
        try:
            await asyncio.wait([working], timeout=self.keys.deadline_s + closing_s)
            is_late = not working.done()
        finally:
            if not await end(working, timeout_s=GRACE_S):
                log.warning("a workflow does not end; it is abandoned")
        if not working.done():
            raise DataFailure("deadline", f"{late}, and its workflow does not end when cancelled")
        try:
            samples = working.result()
        except (Exception, asyncio.CancelledError) as failure:
            cause = first_cause(failure)
            if isinstance(cause, InfraFailure | DataFailure | UserError | RunError):
                raise cause from cause.__cause__
            if is_late:
                if sampler.was_waiting:
                    raise InfraFailure(f"{late}, waiting for tokens") from failure
                raise DataFailure("deadline", f"{late}, in the workflow") from failure
            self._show_once(prompt, cause)
            detail = f"{type(cause).__name__}: {cause}"
            reason = cause.reason if isinstance(cause, EpisodeOver) else "workflow_error"
            raise DataFailure(reason, detail) from cause
        own_prompts = isinstance(self.workflow, OwnPrompts) or context.rewrites_history
        check_samples(
            prompt,
            samples,
            sampler.drawn,
            context.num_samples,
            own_prompts=own_prompts,
            max_sampled=context.max_sampled_tokens,
        )
        return samples

    def _show_once(self, prompt: Prompt, cause: BaseException) -> None:
        """Logs the traceback of a workflow's error, once for each code location."""
        place = traceback.extract_tb(cause.__traceback__)[-1:]
        known = f"{type(cause).__name__} {[(frame.filename, frame.lineno) for frame in place]}"
        if known not in self.shown:
            self.shown.add(known)
            log.warning("prompt %d: %s", prompt.gid, self._blame(), exc_info=cause)

    def _blame(self) -> str:
        if isinstance(self.workflow, Episodes):
            return "the workflow failed"
        return (
            "the workflow failed, and its group with it; where it derives from "
            "pentad.rollout.workflows.Episodes, an error counts against its sample alone"
        )

    async def _scored(self, group: Group) -> Group:
        """Scores the samples. If an episode raised, the cause is unclear, because it may be the
        workflow. If it was ended by its sample, or did not end while others did, it is the
        sample."""
        failed = {id(one) for one in group.samples if FAILED in one.reward_parts}
        if not failed:
            return await self._rewarded(group)
        rest = [one for one in group.samples if id(one) not in failed]
        passed = (await self._rewarded(replace(group, samples=rest))).samples
        known, others = [one.reward for one in passed if one.reward is not None], iter(passed)
        for number, sample in enumerate(group.samples):
            if id(sample) not in failed:
                group.samples[number] = next(others)
            elif known:
                sample.reward = reward_of_episode(sample, known)
        return group

    async def _baseline(self, group: Group, greedy: list[Sample]) -> Greedy:
        """Scores the greedy answer after the samples: if it fails, it has the reward of a failed
        one among them. Of several sequences the mean reward and the greatest length count."""
        known = [sample.reward for sample in group.samples if sample.reward is not None]
        if FAILED in greedy[0].reward_parts:
            rewards = [reward_of_episode(greedy[0], known)]
        else:
            whole = await self._rewarded(replace(group, samples=[*group.samples, *greedy]))
            scored = whole.samples[len(group.samples) :]
            rewards = [sample.reward for sample in scored if sample.reward is not None]
        return Greedy(mean(rewards), max(sample.num_sampled for sample in greedy))

    async def _rewarded(self, group: Group) -> Group:
        if self.reward is None:
            missing = [n for n, one in enumerate(group.samples) if one.reward is None]
            if self.needs_reward and missing:
                rule = "none is set, and the workflow gave no reward"
                place = f"sample {missing[0]} of prompt {group.prompt.gid}"
                remedy = "name a reward, or have the workflow give one to every sample"
                raise UserError(Problem("reward.fn", f"{rule} to {place}", remedy))
        else:
            with timeline.span("rewards", "scores"):
                group = await self.reward.score(group)
        for sample in group.samples:
            sample.environment = None
        return group


def reward_of_episode(sample: Sample, mates: Sequence[float]) -> float:
    """Returns the reward of a sample whose episode failed, given those of the others."""
    is_unclear = WORKFLOW_FAILED in sample.reward_parts
    return reward_of_failed(mates, "unclear" if is_unclear else "sample")


class Executors:
    """The executors of a run's environments, over the same samplers."""

    def __init__(self, executors: Mapping[str, Executor]) -> None:
        self.executors = executors

    async def rollout(self, prompt: Prompt, attempt: int, draft: Draft | None = None) -> Group:
        return await self.executors[prompt.environment].rollout(prompt, attempt, draft)

    def close(self) -> None:
        for executor in self.executors.values():
            executor.close()


def load_workflow(spec: str, agent: str | None = None) -> Workflow:
    """Loads a workflow: `single_turn`, `agent` with the function that `agent` names, an environment
    (`class:...` and the other kinds of `section.py`), or a user's class or function without
    arguments."""
    if spec == "single_turn":
        return SingleTurn()
    kind, rest = workflow_kind(spec)
    if kind == VERIFIERS or spec == "agent":
        return _load_program(spec, agent)
    if kind:
        from pentad.rollout.hosted import load_environment

        return load_environment(kind, rest)
    where = f"rollout.workflow = {spec}"
    if ":" not in spec:
        remedy = "use single_turn, agent, package.module:Class or path/to/file.py:Class"
        raise UserError(Problem(where, "there is no built-in workflow of that name", remedy))
    try:
        workflow = load(spec)()
    except (Exception, SystemExit) as failure:
        rule = f"it cannot be made ({why_not_loaded(failure)})"
        raise UserError(Problem(where, rule)) from failure
    run = getattr(workflow, "run", None)
    if not inspect.iscoroutinefunction(run):
        rule = f"{type(workflow).__name__} has no coroutine `run`"
        raise UserError(Problem(where, rule, "write async def run(self, prompt, sampler, context)"))
    return cast(Workflow, workflow)


def _load_program(spec: str, agent: str | None) -> Workflow:
    """Loads a workflow whose programs call the policy at an address."""
    try:
        from pentad.rollout.agents import load_agent
        from pentad.rollout.verifiers_environment import VerifiersWorkflow
    except ImportError as error:
        rule = f"agents call the policy over HTTP, which needs a web server ({error})"
        remedy = "pip install 'pentad[serve]'"
        raise UserError(Problem(f"rollout.workflow = {spec}", rule, remedy)) from error
    return load_agent(agent) if spec == "agent" else VerifiersWorkflow(spec)
