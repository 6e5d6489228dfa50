"""Workflows: how a prompt becomes samples, by one answer or by several turns with an environment.

Token in, token out: what is trained are the ids the sampler returned. Text from an environment is
rendered and encoded once, as a suffix, and masked; nothing sampled is ever encoded again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from pentad.core.errors import (
    DataFailure,
    InfraFailure,
    RunError,
    UserError,
    first_cause,
    is_cancelled,
)
from pentad.core.seeds import derive_seed
from pentad.core.types import FinishReason, Generation, Prompt, Request, Sample, SamplingParams
from pentad.data.tokenizer import decode_all
from pentad.rewards.scorer import FAILED
from pentad.rollout.environments import Environment, RolloutTokenizer, Tools, observation_ids

T = TypeVar("T")

WORKFLOW_FAILED = f"{FAILED}/workflow_error"
"""The part of samples whose episode failed: they have the mean reward of their mates."""
CLOSE_TIMEOUT_S = 10.0
"""An environment or agent that takes longer to end is left to itself: deadlines must hold."""


class Generator(Protocol):
    """What a workflow may ask of a sampler. Every answer has been checked before it arrives."""

    async def generate(self, request: Request) -> list[Generation]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a workflow knows about the run: how to sample, how often, with which seeds."""

    tokenizer: RolloutTokenizer
    params: SamplingParams
    num_samples: int
    run_seed: int
    attempt: int | str = 0
    """Part of the seeds: new after a data failure, the same when a replica failed."""
    max_total_tokens: int | None = None
    """Most tokens of a sample, prompt included; None if the sampler sets no limit."""
    max_sampled_tokens: int | None = None
    """Most tokens sampled in one sample, over all its turns; None: no limit."""
    show: Callable[[Prompt, BaseException], None] = lambda prompt, error: None
    """Reports an error that does not end the workflow."""

    def seed(self, gid: int, index: int) -> int:
        return derive_seed(self.run_seed, "sample", gid, self.attempt, index)

    def room(self, num_tokens: int, num_sampled: int = 0) -> int:
        """How many tokens may be drawn after `num_tokens`, of which `num_sampled` were sampled in
        earlier turns; 0 when the sample is full."""
        limits = [self.params.max_new_tokens]
        if self.max_total_tokens is not None:
            limits.append(self.max_total_tokens - num_tokens)
        if self.max_sampled_tokens is not None:
            limits.append(self.max_sampled_tokens - num_sampled)
        return max(0, min(limits))

    def request(self, ids: Sequence[int], seeds: Sequence[int], num_sampled: int = 0) -> Request:
        """Continues `ids`, of which `num_sampled` were sampled, once per seed. The executor gives
        the request its id."""
        params = replace(self.params, max_new_tokens=self.room(len(ids), num_sampled))
        return Request(id="", prompt_ids=tuple(ids), params=params, seeds=tuple(seeds))

    def text_of(self, generation: Generation) -> str:
        """The sampled ids as text, without special tokens and without the id that ended them."""
        return self.texts_of([generation])[0]

    def texts_of(self, generations: Sequence[Generation]) -> list[str]:
        is_ended = [self.ending_id(generation) is not None for generation in generations]
        pairs = zip(generations, is_ended, strict=True)
        return decode_all(self.tokenizer, [g.ids[:-1] if ended else g.ids for g, ended in pairs])

    def ending_id(self, generation: Generation) -> int | None:
        """The stop id at the end of the answer, if that is what ended it."""
        ended = generation.finish == "stop" and generation.ids[-1] in self.params.stop_ids
        return generation.ids[-1] if ended else None


class Workflow(Protocol):
    """Turns one prompt into its samples. Raises DataFailure if the prompt cannot be used."""

    async def run(self, prompt: Prompt, sampler: Generator, context: Context) -> list[Sample]: ...


class OwnPrompts:
    """A workflow that makes its own prompts: its samples need not begin with the prompt's ids, and
    may be more than the settings say. Every trained token is still held against what was drawn."""


class Transcript:
    """One sample as it grows: prompt, then sampled and environment tokens in their order."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.routes: np.ndarray | None = None
        self.add_given(prompt_ids)

    @property
    def num_sampled(self) -> int:
        return sum(self.mask)

    def add_given(self, ids: Sequence[int]) -> None:
        """Tokens of the prompt or the environment: context, never trained."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def add_sampled(self, generation: Generation) -> None:
        self.ids += generation.ids
        self.mask += [True] * len(generation.ids)
        self.logprobs += generation.logprobs
        self.versions += generation.versions
        routes = generation.routes
        if routes is not None and self.routes is not None:
            # An earlier turn's tokens keep the experts with which that turn was drawn. Its last
            # token was first computed now.
            known = len(self.routes) - 1
            routes = np.concatenate([self.routes[:known], routes[known:]])
        self.routes = routes

    def finished(self, finish: FinishReason, text: str) -> Sample:
        if self.routes is not None and len(self.routes) < len(self.ids):
            # Tokens after the last answer: no trained token depends on where they are sent.
            missing = len(self.ids) - len(self.routes)
            self.routes = np.concatenate([self.routes, np.repeat(self.routes[-1:], missing, 0)])
        return Sample(
            ids=np.array(self.ids, dtype=np.int64),
            mask=np.array(self.mask, dtype=bool),
            rollout_logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int64),
            finish=finish,
            text=text,
            routes=self.routes,
        )


def check_fits(prompt: Prompt, context: Context) -> None:
    if context.room(len(prompt.ids)) == 0:
        detail = f"prompt {prompt.gid} has {len(prompt.ids)} tokens"
        limit = f"a sample may have {context.max_total_tokens}"
        raise DataFailure("too_long", f"{detail}, {limit}", is_final=True)


def answered(
    prompt_ids: Sequence[int], generations: Sequence[Generation], texts: Sequence[str]
) -> list[Sample]:
    """The samples that `Transcript`s of one answer come to, without the way over lists."""
    given = Transcript(prompt_ids).finished("stop", "")
    drawn = [generation.columns() for generation in generations]
    sizes = [size for ids, _, _ in drawn for size in (len(prompt_ids), len(ids))]
    mask = np.repeat(np.tile((False, True), len(drawn)), sizes)
    ids, logprobs, versions = (
        np.concatenate([part for column in columns for part in (before, column)])
        for before, columns in (
            (given.ids, [ids for ids, _, _ in drawn]),
            (given.rollout_logprobs, [logprobs for _, logprobs, _ in drawn]),
            (given.versions, [versions for _, _, versions in drawn]),
        )
    )
    samples, end = [], 0
    for generation, text in zip(generations, texts, strict=True):
        own = slice(end, end := end + len(prompt_ids) + len(generation.ids))
        columns = ids[own], mask[own], logprobs[own], versions[own]
        samples.append(Sample(*columns, generation.finish, text, routes=generation.routes))
    return samples


class SingleTurn:
    """n answers to one prompt, drawn by one request, so that the prompt is prefilled once."""

    async def run(self, prompt: Prompt, sampler: Generator, context: Context) -> list[Sample]:
        check_fits(prompt, context)
        seeds = [context.seed(prompt.gid, i) for i in range(context.num_samples)]
        generations = await sampler.generate(context.request(prompt.ids, seeds))
        return answered(prompt.ids, generations, context.texts_of(generations))


class MultiTurn:
    """n conversations between the policy and an environment, each with one of its own."""

    def __init__(
        self,
        environment: Callable[[], Environment],
        *,
        max_turns: int = 8,
        role: str = "user",
        tools: Tools | None = None,
    ) -> None:
        """`tools`: what the chat template shows to the policy; None: the `tools` of an environment,
        where it has any."""
        self.environment = environment
        self.max_turns = max_turns
        self.role = role
        """Who speaks the observations in the chat template: user, or tool."""
        self.given_tools = tools

    @cached_property
    def tools(self) -> Tools:
        if self.given_tools is not None:
            return self.given_tools
        found: Tools = getattr(self.environment(), "tools", ())  # of one that is made to be asked
        return found

    async def run(self, prompt: Prompt, sampler: Generator, context: Context) -> list[Sample]:
        check_fits(prompt, context)

        async def episode(index: int) -> list[Sample]:
            talk = Talk(Transcript(prompt.ids))
            try:
                await contained(self._converse(talk, prompt, index, sampler, context))
            except Exception as error:
                keep_said(error, [talk.sample()] if talk.texts else [])
                raise
            sample = talk.sample()
            if talk.parts:
                sample.reward, sample.reward_parts = sum(talk.parts.values()), talk.parts
            return [sample]

        return await run_episodes(prompt, context, episode)

    async def _converse(
        self, talk: Talk, prompt: Prompt, index: int, sampler: Generator, context: Context
    ) -> None:
        """One conversation. A turn cut off by a token limit is the last one."""
        environment, transcript = self.environment(), talk.transcript
        seed = context.seed(prompt.gid, index)
        try:
            await environment.reset(prompt.fields)
            while True:
                request = context.request(transcript.ids, [seed], transcript.num_sampled)
                [generation] = await sampler.generate(request)
                talk.add_answer(generation, context.text_of(generation))
                step = await environment.step(talk.texts[-1])
                for name, value in step.reward_parts.items():
                    talk.parts[name] = talk.parts.get(name, 0.0) + value
                if step.is_done or generation.finish == "length":
                    break
                ending = context.ending_id(generation)
                given = observation_ids(step.observation, self.role, ending, context.tokenizer)
                num_tokens = len(transcript.ids) + len(given)
                is_full = context.room(num_tokens, transcript.num_sampled) == 0
                if is_full or len(talk.texts) == self.max_turns:
                    talk.finish = "length"
                    break
                transcript.add_given(given)
                if step.observation is not None:
                    talk.turns.append((self.role, step.observation))
        finally:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await environment.close()


@dataclass(slots=True)
class Talk:
    """A conversation as it grows."""

    transcript: Transcript
    texts: list[str] = field(default_factory=list)
    """Of the policy."""
    turns: list[tuple[str, str]] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    """Of its reward."""
    finish: FinishReason = "stop"

    def add_answer(self, generation: Generation, text: str) -> None:
        self.transcript.add_sampled(generation)
        self.texts.append(text)
        self.turns.append(("assistant", text))
        self.finish = generation.finish

    def sample(self) -> Sample:
        sample = self.transcript.finished(self.finish, "\n".join(self.texts))
        sample.turns = tuple(self.turns)
        return sample


class EpisodeFailed(Exception):
    """The user's code raised in an episode in which the policy had said something."""

    def __init__(self, cause: BaseException, samples: list[Sample]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.samples = samples


def keep_said(error: Exception, samples: list[Sample]) -> None:
    """Raises EpisodeFailed with what was said until an error of the user's code. Errors of the run
    and of its machinery, and those before the first answer, are no doing of an answer."""
    cause = first_cause(error)
    is_own = isinstance(cause, InfraFailure | DataFailure | UserError | RunError)
    if samples and not is_own:
        raise EpisodeFailed(cause, samples) from error


async def run_episodes(
    prompt: Prompt,
    context: Context,
    episode: Callable[[int], Coroutine[Any, Any, list[Sample]]],
) -> list[Sample]:
    """The samples of a group in which each has an episode of its own.

    An episode that fails is run once more, with the same seed. If it fails again while others
    pass, what was said in it is kept, marked with WORKFLOW_FAILED: otherwise an answer could have
    its group dropped. If none passes, the first error is raised.
    """

    async def run(index: int) -> list[Sample] | EpisodeFailed:
        with suppress(EpisodeFailed):
            return await episode(index)
        try:
            return await episode(index)
        except EpisodeFailed as failed:
            return failed

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(index)) for index in range(context.num_samples)]
    found = [task.result() for task in tasks]
    failed = [one for one in found if isinstance(one, EpisodeFailed)]
    if len(failed) == len(found):
        raise failed[0].cause
    for one in failed:
        context.show(prompt, one.cause)
        for sample in one.samples:
            sample.reward_parts = {FAILED: 1.0, WORKFLOW_FAILED: 1.0}
    kept = [one.samples if isinstance(one, EpisodeFailed) else one for one in found]
    return [sample for samples in kept for sample in samples]


async def contained(work: Coroutine[Any, Any, T]) -> T:
    """The user's code in a task of its own: what would end the loop or pass for a cancellation
    of the group is an error of that code."""
    try:
        return await work
    except SystemExit as failure:
        raise RuntimeError(repr(failure)) from failure
    except asyncio.CancelledError as failure:
        if is_cancelled():
            raise
        raise RuntimeError("it awaited something that was cancelled") from failure
