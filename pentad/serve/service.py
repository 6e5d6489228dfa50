"""Runs jobs on the sampler, text work in threads, and cancels work of clients that have
disconnected."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from pentad.core.errors import RunError, first_cause
from pentad.core.tasks import end
from pentad.core.types import Generation, Request, TopTokens
from pentad.data.tokenizer import Tokenizer
from pentad.infer.sampler import EmbeddedSampler
from pentad.serve.answers import Answer
from pentad.serve.jobs import Job

SMALL_BYTES = 32 << 10
"""A request of at most this many bytes is small: its text takes a few milliseconds."""
NUM_SMALL = 2


class TextWork:
    """Parses, renders, encodes and decodes in threads.

    Small requests have separate threads, so they never wait for a large one; large ones are
    processed one at a time, in order. A thread is free again when its work has ended, not when the
    client disconnects, so reconnecting clients start no further threads.
    """

    def __init__(self) -> None:
        self.small = asyncio.Semaphore(NUM_SMALL)
        self.large = asyncio.Semaphore(1)
        self.num_running = 0

    async def run(self, num_bytes: int, action: Callable[[], T]) -> T:
        free = self.small if num_bytes <= SMALL_BYTES else self.large
        await free.acquire()
        work = in_thread(action)
        self.num_running += 1

        def ended(done: asyncio.Future[Any]) -> None:
            free.release()
            self.num_running -= 1
            if not done.cancelled():
                done.exception()  # marks it as retrieved: the client may have disconnected

        work.add_done_callback(ended)
        result: T = await asyncio.shield(work)
        return result


def in_thread(action: Callable[[], Any]) -> asyncio.Future[Any]:
    """Runs the action in a daemon thread, which does not keep the process from exiting; returns a
    future of the result."""
    done: Future[Any] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(action())
        except BaseException as error:  # exit() in a program counts as its error
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            done.set_exception(error if is_plain else RuntimeError(repr(error)))

    threading.Thread(target=run, name=getattr(action, "__name__", "work"), daemon=True).start()
    return asyncio.wrap_future(done)


T = TypeVar("T")
EmitEvent = Callable[[dict[str, Any]], Awaitable[None]]
OnTopToken = Callable[[int, int, float, TopTokens], None]

BYTES_A_TOKEN = 64
"""Weight in bytes of an answer's token in `TextWork`: text is processed token by token."""
SHARE = 0.5
"""Maximum share of concurrent answers for the prompts of one request."""


class Service:
    """One model and its requests."""

    def __init__(self, sampler: EmbeddedSampler, tokenizer: Tokenizer, name: str) -> None:
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.name = name
        self.text_work = TextWork()

    async def answer(self, job: Job) -> bytes:
        """Returns the complete answer as JSON."""
        generations = await self._generate(job, None)
        answer = Answer(job, self.name, self.tokenizer)
        return await self.text_work.run(
            BYTES_A_TOKEN * sum(len(g.ids) for g in generations),
            lambda: as_json(answer.whole(generations)),
        )

    async def stream(self, job: Job, emit: EmitEvent) -> None:
        """Emits the answer chunk by chunk while tokens are sampled."""
        answer = Answer(job, self.name, self.tokenizer)
        tokens: asyncio.Queue[tuple[int, int, float, TopTokens] | None] = asyncio.Queue()

        async def generate() -> list[Generation]:
            try:
                return await self._generate(job, lambda *token: tokens.put_nowait(token))
            finally:
                tokens.put_nowait(None)

        work = asyncio.create_task(generate())
        try:
            for index in range(len(answer.texts)):
                await _emit_some(emit, answer.opening(index))
            while (token := await tokens.get()) is not None:
                await _emit_some(emit, answer.progress(*token))
                await asyncio.sleep(0)  # lets other tasks run between two tokens
            generations = await work
        finally:
            await end(work)
        for index, generation in enumerate(generations):
            await emit(answer.closing(index, generation))
        if job.body.stream_options.include_usage:
            await emit(answer.final_usage(sum(len(g.ids) for g in generations)))

    async def _generate(self, job: Job, on_token: OnTopToken | None) -> list[Generation]:
        """Returns one generation per choice: those of the first prompt, then those of the next.
        Limits the share of the engine for a request with many prompts."""
        max_running = self.sampler.engine.settings.rollout.max_sequences
        free = asyncio.Semaphore(max(1, int(SHARE * max_running) // job.body.n))

        async def one(place: int, request: Request) -> list[Generation]:
            async with free:
                if on_token is None:
                    return await self.sampler.generate(request)
                tops: dict[int, TopTokens] = {}
                return await self.sampler.generate(
                    request,
                    lambda i, token, logprob: on_token(
                        place * job.body.n + i, token, logprob, tops.get(i, [])
                    ),
                    tops.__setitem__,
                )

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*pair)) for pair in enumerate(job.requests)]
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from failures
        generations = [generation for task in tasks for generation in task.result()]
        if any(generation.finish == "abort" for generation in generations):
            raise RunError("the request was aborted")
        return generations


def as_json(body: dict[str, Any]) -> bytes:
    """Encodes choice by choice: one call for a large answer would block all other threads."""
    choices = [_encoded(choice) for choice in body.get("choices", [])]
    if len(choices) < 2:
        return _encoded(body).encode()
    head, tail = _encoded({**body, "choices": []}).split('"choices":[]', 1)
    return f'{head}"choices":[{",".join(choices)}]{tail}'.encode()


def _encoded(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


async def _emit_some(emit: EmitEvent, chunk: dict[str, Any] | None) -> None:
    if chunk is not None:
        await emit(chunk)


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


async def while_connected(
    disconnected: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]
) -> T:
    """Awaits the work; cancels it and raises ClientGone if the client disconnects."""
    task, watch = asyncio.create_task(work), asyncio.create_task(disconnected)
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await end(watch, task)
