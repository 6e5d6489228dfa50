"""Workflows: turn a prompt into samples, by one answer or by several turns with an environment.

Token in, token out: the trained ids are those the sampler returned. Text from an environment is
rendered and encoded once, as a suffix, and masked; sampled text is never re-encoded.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from pentad.core.errors import (
    DataFailure,
    InfraFailure,
    RunError,
    UserError,
    first_cause,
    is_cancelled,
)
from pentad.core.seeds import derive_seed
from pentad.core.tasks import end
from pentad.core.types import Generation, Prompt, Request, Sample, SamplingParams
from pentad.data.tokenizer import decode_all
from pentad.rewards.scorer import FAILED
from pentad.rollout.environments import (
    Environment,
    RolloutTokenizer,
    Tools,
    observation_ids,
    tools_of,
)
from pentad.rollout.history import History
from pentad.rollout.retries import GroupRetries
from pentad.rollout.transcript import Talk, Transcript, answered

T = TypeVar("T")
log = logging.getLogger(__name__)

WORKFLOW_FAILED = f"{FAILED}/workflow_error"
"""Reward part of samples whose episode raised: they get the mean reward of the others."""
WORKFLOW_LATE = f"{FAILED}/deadline"
"""Reward part of samples whose episode did not end in time: their reward is at most 0."""
CLOSE_TIMEOUT_S = 10.0
"""Time limit for an environment or agent to close, in seconds; a slower one is abandoned to keep
the deadline."""


class Generator(Protocol):
    """The part of a sampler that a workflow may use. Answers are already checked."""

    async def generate(self, request: Request) -> list[Generation]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The run's settings for a workflow: sampling parameters, number of samples, seeds, limits."""

    tokenizer: RolloutTokenizer
    params: SamplingParams
    num_samples: int
    run_seed: int
    attempt: int | str = 0
    """Part of the seeds: changes after a data failure, not after the failure of a replica."""
    retries: GroupRetries = field(default_factory=GroupRetries)
    """Counts failures of the group's episodes."""
    max_total_tokens: int | None = None
    """Maximum tokens of a sample, prompt included; None if the sampler sets no limit."""
    max_sampled_tokens: int | None = None
    """Maximum sampled tokens of a sample, over all its turns; None: no limit."""
    deadline_s: float | None = None
    """Time limit for the episodes of a group; None: no limit."""
    tool_timeout_s: float = 30.0
    """Time limit for one call of an environment in a separate process."""
    rewrites_history: bool = False
    """Whether the chat template renders the earlier turns of a conversation."""
    has_scorer: bool = False
    """Whether samples without a reward get one from `reward.fn`."""
    keeps_failed: bool = False
    """Whether samples are marked, instead of the error raised, if no episode succeeds, too."""
    show: Callable[[Prompt, BaseException], None] = lambda prompt, error: None
    """Reports an error that does not end the workflow."""

    def seed(self, gid: int, index: int) -> int:
        return derive_seed(self.run_seed, "sample", gid, self.attempt, index)

    def room(self, num_tokens: int, num_sampled: int = 0) -> int:
        """Returns how many tokens may be sampled after `num_tokens`, of which `num_sampled` were
        sampled in earlier turns; 0 if the sample is full."""
        limits = [self.params.max_new_tokens]
        if self.max_total_tokens is not None:
            limits.append(self.max_total_tokens - num_tokens)
        if self.max_sampled_tokens is not None:
            limits.append(self.max_sampled_tokens - num_sampled)
        return max(0, min(limits))

    def request(self, ids: Sequence[int], seeds: Sequence[int], num_sampled: int = 0) -> Request:
        """Returns a request that continues `ids`, of which `num_sampled` were sampled, once per
        seed. The executor sets its id."""
        params = replace(self.params, max_new_tokens=self.room(len(ids), num_sampled))
        return Request(id="", prompt_ids=tuple(ids), params=params, seeds=tuple(seeds))

    def text_of(self, generation: Generation) -> str:
        """Decodes the sampled ids, without special tokens and without the stop id."""
        return self.texts_of([generation])[0]

    def texts_of(self, generations: Sequence[Generation]) -> list[str]:
        stops = frozenset(self.params.stop_ids)  # there may be thousands
        return decode_all(
            self.tokenizer, [g.ids[:-1] if _is_ended(g, stops) else g.ids for g in generations]
        )

    def ending_id(self, generation: Generation) -> int | None:
        """Returns the stop id at the end of the answer, if a stop id ended it."""
        return generation.ids[-1] if _is_ended(generation, self.params.stop_ids) else None


def _is_ended(generation: Generation, stop_ids: Collection[int]) -> bool:
    return generation.finish == "stop" and generation.ids[-1] in stop_ids


class EpisodeOver(Exception):
    """Ends an episode because of the policy's actions; `reason`: name of the reward part for it."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(detail)


class Workflow(Protocol):
    """Turns one prompt into its samples. Raises DataFailure if the prompt cannot be used."""

    async def run(self, prompt: Prompt, sampler: Generator, context: Context) -> list[Sample]: ...


class OwnPrompts:
    """A workflow that makes its own prompts: its samples need not start with the prompt's ids,
    and there may be more than `n_samples`. Every trained token is still compared with the
    sampled ones."""


def check_fits(prompt: Prompt, context: Context) -> None:
    if context.room(len(prompt.ids)) == 0:
        detail = f"prompt {prompt.gid} has {len(prompt.ids)} tokens"
        limit = f"a sample may have {context.max_total_tokens}"
        raise DataFailure("too_long", f"{detail}, {limit}", is_final=True)


class SingleTurn:
    """Samples n answers to one prompt by one request, so that the prompt is prefilled once."""

    async def run(self, prompt: Prompt, sampler: Generator, context: Context) -> list[Sample]:
        check_fits(prompt, context)
        seeds = [context.seed(prompt.gid, i) for i in range(context.num_samples)]
        generations = await sampler.generate(context.request(prompt.ids, seeds))
        return answered(prompt.ids, generations, context.texts_of(generations))


class Said:
    """The sampler for one episode; records sampled tokens and times."""

    def __init__(self, sampler: Generator) -> None:
        self.sampler = sampler
        self.answers: list[tuple[Request, Generation]] = []
        self.clock = asyncio.get_running_loop().time
        self.begun = self.since = self.clock()
        self.own_s = 0.0
        """Seconds without a request in progress, until `since`."""
        self.num_waiting = 0

    async def generate(self, request: Request) -> list[Generation]:
        if not self.num_waiting:
            self.own_s += self.clock() - self.since
        self.num_waiting += 1
        try:
            answers = await self.sampler.generate(request)
        finally:
            self.num_waiting -= 1
            self.since = self.clock()
        self.answers += [(request, answer) for answer in answers]
        return answers

    @property
    def is_starved(self) -> bool:
        """Whether it waits for tokens: for the first ones, or it spent most of its time waiting."""
        is_idle = not self.answers or self.own_s <= (self.clock() - self.begun) / 2
        return self.num_waiting > 0 and is_idle

    def samples(self, prompt: Prompt, context: Context, *, own_prompts: bool) -> list[Sample]:
        """Returns one sample per sequence; without `own_prompts` only the last that begins with the
        prompt."""
        talks: list[Talk] = []
        for request, generation in self.answers:
            ids = list(request.prompt_ids)
            if (talk := Talk.continued_by(ids, talks)) is None:
                talks.append(talk := Talk(Transcript(ids)))
            elif given := ids[len(talk.transcript.ids) :]:
                talk.transcript.add_given(given)
                talk.turns.append(("user", decode_all(context.tokenizer, [given])[0]))
            talk.add_answer(generation, context.text_of(generation))
        if not own_prompts:
            size = len(prompt.ids)
            usable = [t for t in talks if tuple(t.transcript.ids[:size]) == tuple(prompt.ids)]
            return [talk.sample() for talk in usable[-1:]]
        samples = [talk.sample() for talk in talks]
        for sample in samples:
            given = sample.ids[: int(sample.mask.argmax())].tolist()
            sample.given_text = context.tokenizer.decode(given, skip_special_tokens=False)
        return samples


@dataclass(slots=True)
class EpisodeFailed:
    """A failed episode, with the tokens that the policy had sampled."""

    part: str
    """WORKFLOW_FAILED, WORKFLOW_LATE, or the part of an `EpisodeOver`."""
    cause: BaseException
    samples: list[Sample]


class Episodes:
    """Base of workflows with one episode per sample; subclasses implement `episode`.

    An error affects only the sample whose episode raised it: an answer that causes a failure must
    not drop its group, or the policy could select its training data.
    """

    async def episode(
        self, prompt: Prompt, index: int, sampler: Generator, context: Context
    ) -> Sample | list[Sample]:
        """Returns sample `index` of the group, sampled with `context.seed(prompt.gid, index)`."""
        raise NotImplementedError

    async def run(self, prompt: Prompt, sampler: Generator, context: Context) -> list[Sample]:
        check_fits(prompt, context)
        own_prompts = isinstance(self, OwnPrompts) or context.rewrites_history
        attempts = Attempts(prompt, sampler, context, own_prompts=own_prompts)
        return await attempts.run(lambda i, said: self.episode(prompt, i, said, context))


EpisodeRunner = Callable[[int, Generator], Coroutine[Any, Any, Sample | list[Sample]]]


@dataclass(eq=False)
class Attempts:
    """Runs the episodes of one group.

    An episode that raises is run once more, with the same seed. If it raises again, or has not
    ended at the deadline, while others succeed, its sampled tokens are kept and marked. If none
    succeeds, the first error is raised; so is an infrastructure failure, or an error before the
    first answer of an episode.
    """

    prompt: Prompt
    sampler: Generator
    context: Context
    own_prompts: bool
    said: dict[int, Said] = field(default_factory=dict)
    """The sampler of the current attempt, by sample."""
    failed: dict[int, EpisodeFailed] = field(default_factory=dict)

    async def run(self, episode: EpisodeRunner) -> list[Sample]:
        indices = range(self.context.num_samples)
        tasks = [asyncio.ensure_future(self._attempt(episode, index)) for index in indices]
        try:
            await asyncio.wait(
                tasks, timeout=self.context.deadline_s, return_when=asyncio.FIRST_EXCEPTION
            )
            errors = [error for task in tasks if task.done() and (error := task.exception())]
            if errors:
                raise first_cause(BaseExceptionGroup("episodes", errors))
            for index, task in enumerate(tasks):
                if not task.done():
                    self._give_up(index)
        finally:
            # One that does not end is abandoned to keep the deadline.
            if not await end(*tasks, timeout_s=CLOSE_TIMEOUT_S + 1):
                log.warning("prompt %d: an episode does not end; it is abandoned", self.prompt.gid)
        return self._settled([[] if i in self.failed else tasks[i].result() for i in indices])

    async def _attempt(self, episode: EpisodeRunner, index: int) -> list[Sample]:
        """Runs an episode, again if it fails; returns an empty list if that fails, too."""
        while True:
            said = self.said[index] = Said(self.sampler)
            try:
                found = await contained(episode(index, said))
                samples = [found] if isinstance(found, Sample) else found
                check_finite(samples)
            except Exception as error:
                cause = first_cause(error)
                # Errors of the run and its infrastructure are not caused by an answer.
                is_ours = isinstance(cause, InfraFailure | DataFailure | UserError | RunError)
                part = WORKFLOW_FAILED
                if isinstance(cause, EpisodeOver):
                    part = f"{FAILED}/{cause.reason}"
                if is_ours or not self._keep(index, part, cause):
                    raise
                if not self.context.retries.repeats((self, index)):
                    return []
            else:
                self.failed.pop(index, None)
                return samples

    def _give_up(self, index: int) -> None:
        """Ends the group at the deadline. Time outside of the sampler counts against the
        episode."""
        if index in self.failed:
            return
        late = f"the group was not done after {self.context.deadline_s} s"
        if self.said[index].is_starved:
            raise InfraFailure(f"{late}, waiting for tokens")
        cause = DataFailure("deadline", f"{late}, in the workflow")
        if not self._keep(index, WORKFLOW_LATE, cause):
            raise cause

    def _keep(self, index: int, part: str, cause: BaseException) -> bool:
        """Keeps the episode if it sampled tokens; returns whether it was kept."""
        drawn = self.said[index]
        said = drawn.samples(self.prompt, self.context, own_prompts=self.own_prompts)
        if said:
            self.failed[index] = EpisodeFailed(part, cause, said)
        return bool(said)

    def _settled(self, found: list[list[Sample]]) -> list[Sample]:
        if len(self.failed) == len(found) and not self.context.keeps_failed:
            raise self.failed[0].cause
        for index, failed in self.failed.items():
            self.context.show(self.prompt, failed.cause)
            for sample in failed.samples:
                sample.reward_parts = {FAILED: 1.0, failed.part: 1.0}
            found[index] = failed.samples
        return [sample for samples in found for sample in samples]


def check_finite(samples: Sequence[Sample]) -> None:
    """Raises ValueError for a reward that is not finite; answers may cause such rewards."""
    for sample in samples:
        parts = {"reward": sample.reward or 0.0, **sample.reward_parts}
        wrong = [f"{name} = {value}" for name, value in parts.items() if not math.isfinite(value)]
        if wrong:
            raise ValueError(f"the episode's {wrong[0]} is not a finite number")


class MultiTurn(Episodes):
    """Runs n conversations between the policy and an environment, each with a separate environment
    object."""

    def __init__(
        self,
        environment: Callable[[], Environment],
        *,
        max_turns: int = 8,
        role: str = "user",
        tools: Tools | None = None,
    ) -> None:
        """`tools`: tools that the chat template shows to the policy; None: the environment's
        `tools`, if any."""
        self.environment = environment
        self.max_turns = max_turns
        self.role = role
        """Role of the observations in the chat template: user, or tool."""
        self.given_tools = tools

    @cached_property
    def tools(self) -> Tools:
        if self.given_tools is not None:
            return self.given_tools
        found: Tools = getattr(self.environment(), "tools", ())  # of an object made only for this
        return found

    def make(self, context: Context, seed: int) -> Environment:
        """Makes the environment of one sample."""
        return self.environment()

    async def begin(self, environment: Environment, prompt: Prompt, context: Context) -> Prompt:
        """Returns the prompt with the first tokens of a conversation."""
        await environment.reset(prompt.fields)
        return prompt

    async def finish(self, environment: Environment, talk: Talk, context: Context) -> None:
        """Called after the last answer of a conversation."""

    async def episode(
        self, prompt: Prompt, index: int, sampler: Generator, context: Context
    ) -> list[Sample]:
        talk = await self._converse(prompt, context.seed(prompt.gid, index), sampler, context)
        samples = talk.samples()
        for sample in samples:
            given = sample.ids[: int(sample.mask.argmax())].tolist()
            if given != list(prompt.ids):
                sample.given_text = context.tokenizer.decode(given, skip_special_tokens=False)
        return samples

    async def _converse(
        self, prompt: Prompt, seed: int, sampler: Generator, context: Context
    ) -> Talk:
        """Runs one conversation. A turn cut off by a token limit is the last one."""
        environment = self.make(context, seed)
        try:
            opening = await self.begin(environment, prompt, context)
            talk = Talk(Transcript(opening.ids))
            if context.rewrites_history:
                talk.history = History(opening, tools_of(self), context.tokenizer)
            while await self._turn(talk, environment, seed, sampler, context):
                pass
            await self.finish(environment, talk, context)
            return talk
        finally:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await environment.close()

    async def _turn(
        self, talk: Talk, environment: Environment, seed: int, sampler: Generator, context: Context
    ) -> bool:
        """Samples an answer and adds the environment's response; False after the last turn."""
        if talk.earlier:  # another seed: equal contexts must not repeat the same samples
            seed = derive_seed(seed, "sequence", len(talk.earlier))
        request = context.request(talk.transcript.ids, [seed], talk.num_sampled)
        [generation] = await sampler.generate(request)
        talk.add_answer(generation, context.text_of(generation))
        step = await environment.step(talk.texts[-1])
        for name, value in step.reward_parts.items():
            talk.parts[name] = talk.parts.get(name, 0.0) + value
        if step.is_done or generation.finish == "length":
            return False
        said = (step.observation,) if isinstance(step.observation, str) else step.observation or ()
        ending, known = context.ending_id(generation), talk.transcript.ids
        if talk.history is None:
            following = known + observation_ids(said, self.role, ending, context.tokenizer)
        else:
            answer = generation.ids if ending is None else generation.ids[:-1]
            following = talk.history.following(answer, said, self.role, known)
        if context.room(len(following), talk.num_sampled) == 0 or len(talk.texts) == self.max_turns:
            talk.finish = "length"
            return False
        if following[: len(known)] == known:
            talk.transcript.add_given(following[len(known) :])
        else:
            talk.go_on(following)
        talk.turns += [(self.role, text) for text in said]
        return True


async def contained(work: Coroutine[Any, Any, T]) -> T:
    """Runs user code in a separate task: an exception that would end the event loop, or look like a
    cancellation of the group, becomes a RuntimeError."""
    try:
        return await work
    except SystemExit as failure:
        raise RuntimeError(repr(failure)) from failure
    except asyncio.CancelledError as failure:
        if is_cancelled():
            raise
        raise RuntimeError("it awaited a task that was cancelled") from failure
