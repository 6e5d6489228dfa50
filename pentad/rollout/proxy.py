"""The recording proxy: an OpenAI-compatible server that records its answers, token by token.

An episode is one run of an agent program, with a separate address and key. Every answer is recorded
as the sampled ids, with their log-probs and versions. A continued conversation is not encoded
again: the recorded ids are reused, and only the program's new messages are rendered after them.
Sampling follows the run's settings: temperature, top_p, top_k and seed of a request are ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pentad.core.errors import InfraFailure, Problem
from pentad.core.seeds import derive_seed
from pentad.core.tasks import end
from pentad.core.types import Generation, Request, Sample
from pentad.data.tokenizer import Tokenizer, find_prefix
from pentad.rollout.environments import following_ids
from pentad.rollout.transcript import Talk, Transcript
from pentad.rollout.workflows import Context, Generator
from pentad.serve.answers import Answer
from pentad.serve.app import (
    App,
    Guard,
    HttpRequest,
    HttpResponse,
    answering,
    app_of,
    check_key,
    disconnected,
    event_answer,
    events_of,
    json_answer,
    last_events,
    read_body,
    read_object,
)
from pentad.serve.dialects import ChatDialect
from pentad.serve.jobs import (
    Conversation,
    Job,
    chat_ids,
    chat_limit,
    prompt_ids,
    read_conversation,
    with_calls,
)
from pentad.serve.server import bind, serve
from pentad.serve.service import BYTES_A_TOKEN, TextWork, as_json, while_connected
from pentad.serve.wire import (
    ApiError,
    ChatBody,
    CompletionBody,
    ServeLimits,
    read_chat,
    read_completion,
)

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MAX_CONNECTIONS = 4096
MODEL = "policy"
"""The model name in answers. Requests may have any name, because there is only one policy."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed request."""

    body: ChatBody | CompletionBody
    ids: list[int]
    limit: int | None
    conversation: Conversation | None
    """The messages; None if it is a completion."""


class Episode:
    """The requests of one run of an agent program, and their answers."""

    def __init__(self, sampler: Generator, context: Context, seed: int) -> None:
        self.name, self.key = secrets.token_hex(8), secrets.token_urlsafe(24)
        self.sampler = sampler
        self.context = context
        self.seed = seed
        stop_ids = context.params.stop_ids
        eos = stop_ids[0] if stop_ids else 0
        self.tokenizer = Tokenizer(
            folder=Path(),
            inner=context.tokenizer,
            vocab_size=0,
            eos_id=eos,
            stop_ids=stop_ids,
            prefix_ids=find_prefix(context.tokenizer),
        )
        self.talks: list[Talk] = []
        """The sequences, each with role and text of all messages from its first answer on."""
        self.texts: list[str] = []
        self.known: dict[bytes, tuple[list[int], int | None]] = {}
        """Digests of conversations that end in an answer -> their ids, and the stop id at the
        end."""
        self.num_requests = 0
        self.is_open = True
        self.under_way: set[asyncio.Task[list[Generation]]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set to an infrastructure failure, from which the program cannot recover."""

    # Requests.

    def read_chat(self, raw: Mapping[str, Any]) -> ParsedRequest:
        body = read_chat(raw)
        if body.chat_template_kwargs:
            rule, name = "the run's template_args set how it is rendered", "chat_template_kwargs"
            raise ApiError(Problem(name, rule), param=name, code="unsupported_parameter")
        found = read_conversation(body, self.tokenizer)
        conversation = replace(found, messages=[settled(m) for m in found.messages])
        limit = chat_limit(body)
        check_alternatives("top_logprobs", body.top_logprobs)
        return ParsedRequest(body, self.conversation_ids(conversation), limit, conversation)

    def read_completion(self, raw: Mapping[str, Any]) -> ParsedRequest:
        body = read_completion(raw)
        if len(body.prompt) != 1:
            problem = Problem("prompt", f"has {len(body.prompt)} texts", "send them one by one")
            raise ApiError(problem, param="prompt")
        [ids] = prompt_ids(body.prompt, self.tokenizer)
        check_alternatives("logprobs", body.logprobs or 0)
        return ParsedRequest(body, ids, body.max_tokens, None)

    def conversation_ids(self, conversation: Conversation) -> list[int]:
        """Returns the ids of the longest recorded prefix, followed by the rendered rest."""
        messages = conversation.messages
        digests = beginnings(conversation)
        for size in range(len(messages) - 1, 0, -1):
            found = self.known.get(digests[size - 1])
            if found is not None:
                ids, ending_id = found
                return ids + following_ids(messages[size:], ending_id, self.context.tokenizer)
        return chat_ids(conversation, self.tokenizer)

    def job(self, parsed: ParsedRequest) -> Job:
        """Makes the sampling job; ApiError if the context has no room for an answer."""
        context, body, ids = self.context, parsed.body, parsed.ids
        if body.ignore_eos:
            problem = Problem("ignore_eos = true", "the run decides what ends an answer")
            raise ApiError(problem, param="ignore_eos", code="unsupported_parameter")
        own, given = context.params, body.model_fields_set
        pairs = {"temperature": (body.temperature, own.temperature)}
        pairs |= {"top_p": (body.top_p, own.top_p), "top_k": (body.top_k, own.top_k)}
        for name, (wanted, used) in pairs.items():
            if name in given and wanted != used:
                log.info("an agent asks for %s = %s; the run's %s is used", name, wanted, used)
        talk = Talk.continued_by(ids, self.talks)
        num_sampled = 0 if talk is None else talk.num_sampled
        room = context.room(len(ids), num_sampled)
        if room == 0:
            where = f"prompt of {len(ids)} tokens, {num_sampled} of them sampled"
            rule = f"leaves no room for an answer within {context.max_total_tokens}"
            if context.max_sampled_tokens is not None:
                rule += f" and gconfig.max_sampled_tokens = {context.max_sampled_tokens}"
            problem = Problem(where, rule)
            raise ApiError(problem, param="messages", code="context_length_exceeded")
        params = replace(
            context.params,
            max_new_tokens=min(room, parsed.limit or room),
            stop_ids=tuple(dict.fromkeys((*context.params.stop_ids, *body.stop_token_ids))),
            stop_strings=(*context.params.stop_strings, *body.stop_strings),
        )
        number, self.num_requests = self.num_requests, self.num_requests + 1
        seeds = tuple(derive_seed(self.seed, "turn", number, j) for j in range(body.n))
        request = Request(id="", prompt_ids=tuple(ids), params=params, seeds=seeds)
        reads_calls = parsed.conversation is not None and parsed.conversation.reads_calls
        name = f"{self.name}-{number}"
        return Job(body=body, id=name, requests=(request,), reads_calls=reads_calls)

    async def generate(self, job: Job) -> list[Generation]:
        task = asyncio.ensure_future(self.sampler.generate(job.requests[0]))
        self.under_way.add(task)
        try:
            return await task
        except InfraFailure as failure:
            if not self.failure.done():
                self.failure.set_exception(failure)
            raise ApiError(str(failure), status=503, kind="server_error") from failure
        finally:
            self.under_way.discard(task)

    async def close(self) -> None:
        """Rejects further requests; aborts requests in progress, also on the sampler."""
        self.is_open = False
        await end(*self.under_way)
        if self.failure.done():
            self.failure.exception()
        self.failure.cancel()

    # Records.

    def record(
        self,
        parsed: ParsedRequest,
        job: Job,
        generations: Sequence[Generation],
        texts: Sequence[str],
        body: Mapping[str, Any],
    ) -> None:
        """Records the sampled tokens and the answer that the program gets."""
        ids, conversation = parsed.ids, parsed.conversation
        for generation, text, choice in zip(generations, texts, body["choices"], strict=True):
            self.texts.append(text)
            self._keep(parsed, generation, text)
            if conversation is not None:
                answer = settled(with_calls(choice["message"]))
                said = replace(conversation, messages=[*conversation.messages, answer])
                ending = generation.ids[-1] if generation.ids[-1] in job.params.stop_ids else None
                ending = ending if generation.finish == "stop" else None
                self.known[beginnings(said)[-1]] = ([*ids, *generation.ids], ending)

    def _keep(self, parsed: ParsedRequest, generation: Generation, text: str) -> None:
        """Adds the tokens as the next turn of the longest sequence that the request continues, or
        as a new sequence."""
        talk = Talk.continued_by(parsed.ids, self.talks)
        if talk is None:
            self.talks.append(talk := Talk(Transcript(parsed.ids)))
        else:
            given = parsed.ids[len(talk.transcript.ids) :]
            talk.transcript.add_given(given)
            talk.turns += self._said(parsed.conversation, given)
        talk.add_answer(generation, text)

    def _said(
        self, conversation: Conversation | None, given: list[int]
    ) -> Iterator[tuple[str, str]]:
        """Yields the program's text since the last answer: its messages, or the added text."""
        if conversation is None:
            yield "user", self.tokenizer.decode(given)
            return
        roles = [message["role"] for message in conversation.messages]
        start = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
        for message in conversation.messages[start:]:
            content = message.get("content", "")
            yield message["role"], content if isinstance(content, str) else json.dumps(content)

    def samples(self) -> list[Sample]:
        """Returns one sample per sequence. All have the text of the whole episode, which is
        scored."""
        samples = [talk.sample() for talk in self.talks]
        for sample in samples:
            sample.text = "\n".join(self.texts)
            if len(sample.turns) == 1:  # a single answer is already the text
                sample.turns = ()
            prompt = sample.ids[: int(sample.mask.argmax())].tolist()
            sample.given_text = self.tokenizer.decode(prompt, keep_special=True)
        return samples


class Proxy:
    """The HTTP server of all running episodes."""

    def __init__(self, limits: ServeLimits | None = None) -> None:
        self.limits = limits or ServeLimits(max_client_connections=MAX_CONNECTIONS)
        self.text_work = TextWork()
        self.episodes: dict[str, Episode] = {}
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listens on a free port of this machine while the context is open."""
        listener = bind(HOST, 0)
        self.port = listener.getsockname()[1]
        stop, ready = asyncio.Event(), asyncio.Event()
        server = asyncio.create_task(
            serve(
                Guard(self.app(), is_loopback=True),
                listener,
                self.limits,
                stop=stop,
                drain_s=1.0,
                on_ready=ready.set,
            )
        )
        try:
            await ready.wait()
            yield
        finally:
            stop.set()
            await asyncio.shield(server)

    def base_url(self, episode: Episode) -> str:
        return f"http://{HOST}:{self.port}/episodes/{episode.name}/v1"

    def app(self) -> App:
        root = "/episodes/{episode}/v1"
        return app_of(
            {
                **answering(root, self._answer),
                f"GET {root}/models": self.models,
            }
        )

    async def models(self, request: HttpRequest) -> HttpResponse:
        self._episode(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "pentad"}
        return json_answer({"object": "list", "data": [model]})

    async def _answer(
        self, request: HttpRequest, is_chat: bool, dialect: ChatDialect | None
    ) -> HttpResponse:
        """Answers a request; records the answer if it is complete and the program is still
        connected. Text is parsed and written in threads, to keep the trainer's event loop free."""
        episode = self._episode(request)
        read = episode.read_chat if is_chat else episode.read_completion
        sent = await read_body(request, self.limits)
        parsed = await self.text_work.run(
            len(sent), lambda: read(read_object(sent, self.limits, dialect))
        )
        job = episode.job(parsed)
        work: Coroutine[Any, Any, list[Generation]] = episode.generate(job)
        generations = await while_connected(disconnected(request.receive), work)

        def write() -> tuple[list[str], dict[str, Any], bytes]:
            whole = Answer(job, MODEL, episode.tokenizer)
            body = whole.whole(generations)
            texts = [stream.sent for stream in whole.texts]
            if job.body.stream:
                return texts, body, events(job, generations, episode.tokenizer, dialect)
            return texts, body, as_json(dialect.whole(body) if dialect else body)

        num_tokens = sum(len(generation.ids) for generation in generations)
        texts, body, answer = await self.text_work.run(BYTES_A_TOKEN * num_tokens, write)
        episode.record(parsed, job, generations, texts, body)
        return event_answer(answer) if job.body.stream else json_answer(answer)

    def _episode(self, request: HttpRequest) -> Episode:
        found = self.episodes.get(request.path_params["episode"])
        if found is None or not found.is_open:
            problem = Problem("episode", "has ended or does not exist", "use a current address")
            raise ApiError(problem, status=404, code="episode_not_found")
        check_key(request.headers, found.key, "this episode")
        return found


def settled(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the message without empty fields, because only some clients send them."""
    needs_content = not message.get("tool_calls")
    return {k: v for k, v in message.items() if v or (k == "content" and needs_content)}


def beginnings(conversation: Conversation) -> list[bytes]:
    """Returns digests of all prefixes of a conversation, by number of messages."""
    digest, found = json.dumps(conversation.tools, sort_keys=True).encode(), []
    for message in conversation.messages:
        shown = json.dumps(message, sort_keys=True).encode()
        digest = hashlib.sha256(digest + shown).digest()
        found.append(digest)
    return found


def check_alternatives(name: str, wanted: int) -> None:
    if wanted:
        rule = "only the log-prob of the sampled token is known"
        raise ApiError(Problem(f"{name} = {wanted}", rule, "give 0"), param=name)


def events(
    job: Job,
    generations: Sequence[Generation],
    tokenizer: Tokenizer,
    dialect: ChatDialect | None = None,
) -> bytes:
    """Returns the answer as events of a stream, one per token."""
    answer = Answer(job, MODEL, tokenizer)
    chunks: list[dict[str, Any] | None] = []
    for index, generation in enumerate(generations):
        chunks.append(answer.opening(index))
        for token, logprob in zip(generation.ids, generation.logprobs, strict=True):
            chunks.append(answer.progress(index, token, logprob, []))
        chunks.append(answer.closing(index, generation))
    if job.body.stream_options.include_usage:
        chunks.append(answer.final_usage(sum(len(g.ids) for g in generations)))
    made = [events_of(chunk, dialect) for chunk in chunks if chunk is not None]
    return b"".join([*made, last_events(dialect)])
