"""From a request's fields to what the sampler is asked: prompts as ids, limits checked, seeds."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pentad.core.errors import Problem, UserError
from pentad.core.seeds import derive_seed
from pentad.core.types import Request, SamplingParams
from pentad.data.render import Columns, encode_prompts
from pentad.data.tokenizer import Tokenizer
from pentad.infer.settings import RequestLimits, check_request
from pentad.serve.conversation import chat_ids, check_unicode, read_conversation
from pentad.serve.wire import (
    MAX_CHOICES,
    ApiError,
    ChatBody,
    CompletionBody,
)

DEFAULT_COMPLETION_TOKENS = 16
"""As with OpenAI; a chat answer may fill the context."""
PLAIN = Columns(key="prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, ready to be run: a sampler's request for each prompt, n choices each."""

    kind: Literal["chat", "completion"]
    id: str
    requests: tuple[Request, ...]
    n: int
    wants_logprobs: bool
    is_streamed: bool
    wants_usage: bool
    wants_ids: bool
    reads_calls: bool = False
    """Whether calls of tools in the answer are parsed."""

    @property
    def params(self) -> SamplingParams:
        return self.requests[0].params

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)


def completion_job(body: CompletionBody, tokenizer: Tokenizer, limits: RequestLimits) -> Job:
    if len(body.prompt) * body.n > MAX_CHOICES:
        rule = f"{len(body.prompt)} prompts would get more than {MAX_CHOICES} answers"
        raise ApiError(Problem(f"n = {body.n}", rule, "send several requests"), param="n")
    prompts = prompt_ids(body.prompt, tokenizer)
    if not prompts or not all(prompts):
        raise ApiError(Problem("prompt", "is empty", "give a text or token ids"), param="prompt")
    max_new = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    return build_job("completion", body, prompts, max_new, tokenizer, limits)


def chat_job(body: ChatBody, tokenizer: Tokenizer, limits: RequestLimits) -> Job:
    limit = chat_limit(body)
    if body.top_logprobs and not body.logprobs:
        problem = Problem(f"top_logprobs = {body.top_logprobs}", "needs logprobs = true")
        raise ApiError(problem, param="top_logprobs")
    conversation = read_conversation(body, tokenizer)
    ids = chat_ids(conversation, tokenizer)
    room = min(limits.max_context, limits.max_cached) - len(ids)
    max_new = limit or max(room, 1)
    job = build_job("chat", body, [ids], max_new, tokenizer, limits)
    return replace(job, reads_calls=conversation.reads_calls)


def chat_limit(body: ChatBody) -> int | None:
    """Most new tokens, by whichever of its two names."""
    limit = body.max_completion_tokens or body.max_tokens
    if body.max_tokens not in (None, limit):
        where = f"max_tokens = {body.max_tokens}"
        rule = f"max_completion_tokens = {body.max_completion_tokens} says otherwise"
        raise ApiError(Problem(where, rule, "give one of the two"), param="max_tokens")
    return limit


def build_job(
    kind: Literal["chat", "completion"],
    body: ChatBody | CompletionBody,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    tokenizer: Tokenizer,
    limits: RequestLimits,
) -> Job:
    """Raises ApiError on what the engine cannot serve."""
    for ids in prompts:
        check_length(len(ids), max_new_tokens, limits)
    own_ends = () if body.ignore_eos else tokenizer.stop_ids
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=min(max(body.top_k, 0), limits.vocab_size),  # -1 is some clients' word for no limit
        stop_ids=tuple(dict.fromkeys((*own_ends, *body.stop_token_ids))),
        stop_strings=body.stop_strings,
        num_top=min(body.num_top, limits.vocab_size),
    )
    name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
    seed = secrets.randbits(62) if body.seed is None else body.seed
    requests = tuple(
        Request(
            id=f"{name}-{i}",
            prompt_ids=tuple(ids),
            params=params,
            seeds=tuple(derive_seed(seed, "choice", i, j) for j in range(body.n)),
        )
        for i, ids in enumerate(prompts)
    )
    for request in requests:
        try:
            check_request(request, limits)
        except UserError as error:
            raise ApiError(str(error).replace(f"request {request.id}: ", "")) from error
    return Job(
        kind=kind,
        id=name,
        requests=requests,
        n=body.n,
        wants_logprobs=body.wants_logprobs,
        is_streamed=body.stream,
        wants_usage=body.stream_options.include_usage,
        wants_ids=body.return_token_ids,
    )


def check_length(num_prompt: int, max_new_tokens: int, limits: RequestLimits) -> None:
    if num_prompt + max_new_tokens <= limits.max_context:
        return
    where = f"prompt of {num_prompt} tokens and {max_new_tokens} new ones"
    rule = f"do not fit the context of {limits.max_context} tokens"
    room = limits.max_context - num_prompt
    remedy = f"ask for at most {room} new ones" if room > 0 else "shorten the prompt"
    raise ApiError(Problem(where, rule, remedy), param="prompt", code="context_length_exceeded")


def prompt_ids(prompts: list[str] | list[list[int]], tokenizer: Tokenizer) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for index, text in enumerate(texts):
        check_unicode(text, f"prompt[{index}]" if len(texts) > 1 else "prompt")
    return encode_prompts(texts, PLAIN, tokenizer) + [p for p in prompts if isinstance(p, list)]
