"""From a request's fields to what the sampler is asked: prompts as ids, limits checked, seeds."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pentad.core.errors import Problem, UserError
from pentad.core.seeds import derive_seed
from pentad.core.types import Request, SamplingParams
from pentad.data.render import BadRow, Columns, encode_prompts, messages_of, render
from pentad.data.tokenizer import Messages, Tokenizer
from pentad.infer.checks import Limits, check_request
from pentad.rollout.serving.wire import (
    MAX_CHOICES,
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    shown,
)

DEFAULT_COMPLETION_TOKENS = 16
"""As with OpenAI; a chat answer may fill the context."""
CHAT = Columns(key="messages", messages_key="messages")
PLAIN = Columns(key="prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request, ready to be run: a sampler's request for each prompt, n choices each."""

    kind: Literal["chat", "completion"]
    id: str
    requests: tuple[Request, ...]
    n: int
    wants_logprobs: bool
    wants_top: bool
    """Whether the likeliest token is to be named beside the chosen one; greedy, it is the same."""
    is_streamed: bool
    wants_usage: bool
    wants_ids: bool

    @property
    def params(self) -> SamplingParams:
        return self.requests[0].params

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)


def completion_job(body: CompletionBody, tokenizer: Tokenizer, limits: Limits) -> Job:
    if len(body.prompt) * body.n > MAX_CHOICES:
        rule = f"{len(body.prompt)} prompts would get more than {MAX_CHOICES} answers"
        raise ApiError(Problem(f"n = {body.n}", rule, "send several requests"), param="n")
    prompts = prompt_ids(body.prompt, tokenizer)
    if not prompts or not all(prompts):
        raise ApiError(Problem("prompt", "is empty", "give a text or token ids"), param="prompt")
    wants = body.logprobs is not None
    top = check_top("logprobs", body.logprobs or 0, body)
    max_new = body.max_tokens or DEFAULT_COMPLETION_TOKENS
    return build_job(
        "completion", body, prompts, max_new, tokenizer, limits, wants_logprobs=wants, wants_top=top
    )


def chat_job(body: ChatBody, tokenizer: Tokenizer, limits: Limits) -> Job:
    limit = chat_limit(body)
    if body.top_logprobs and not body.logprobs:
        problem = Problem(f"top_logprobs = {body.top_logprobs}", "needs logprobs = true")
        raise ApiError(problem, param="top_logprobs")
    top = check_top("top_logprobs", body.top_logprobs, body)
    ids = chat_ids(plain_messages(body.messages, tokenizer), tokenizer)
    room = min(limits.max_context, limits.max_cached) - len(ids)
    max_new = limit or max(room, 1)
    return build_job(
        "chat", body, [ids], max_new, tokenizer, limits, wants_logprobs=body.logprobs, wants_top=top
    )


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
    body: Body,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    wants_logprobs: bool,
    wants_top: bool,
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
        wants_logprobs=wants_logprobs,
        wants_top=wants_top,
        is_streamed=body.stream,
        wants_usage=body.stream_options.include_usage,
        wants_ids=body.return_token_ids,
    )


def check_length(num_prompt: int, max_new_tokens: int, limits: Limits) -> None:
    if num_prompt + max_new_tokens <= limits.max_context:
        return
    where = f"prompt of {num_prompt} tokens and {max_new_tokens} new ones"
    rule = f"do not fit the context of {limits.max_context} tokens"
    room = limits.max_context - num_prompt
    remedy = f"ask for at most {room} new ones" if room > 0 else "shorten the prompt"
    raise ApiError(Problem(where, rule, remedy), param="prompt", code="context_length_exceeded")


def check_top(name: str, wanted: int, body: Body) -> bool:
    """Alternatives to the chosen token are known only where it is the likeliest one itself."""
    if wanted == 0 or (wanted == 1 and body.temperature == 0):
        return wanted == 1
    rule = "the engine reports the log-prob of the chosen token only"
    remedy = "give 0, or 1 at temperature 0"
    raise ApiError(Problem(f"{name} = {wanted}", rule, remedy), param=name)


def prompt_ids(prompts: list[str] | list[list[int]], tokenizer: Tokenizer) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for index, text in enumerate(texts):
        check_unicode(text, f"prompt[{index}]" if len(texts) > 1 else "prompt")
    return encode_prompts(texts, PLAIN, tokenizer) + [p for p in prompts if isinstance(p, list)]


def chat_ids(messages: Messages, tokenizer: Tokenizer) -> list[int]:
    """Of messages as `plain_messages` gives them."""
    try:
        text = render(messages, tokenizer, for_answer=True)
    except BadRow as error:
        raise ApiError(error.at("messages"), param="messages") from error
    check_unicode(text, "messages")
    return encode_prompts([text], CHAT, tokenizer)[0]


def plain_messages(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> Messages:
    """Their roles and texts. Raises ApiError on what no template could render."""
    if not tokenizer.has_chat_template:
        rule = f"the tokenizer in {tokenizer.folder} has no chat template"
        raise ApiError(Problem("messages", rule, "use /v1/completions"), param="messages")
    try:
        flattened = [with_calls(flat(message)) for message in messages]
        plain = messages_of({"messages": flattened}, "messages", CHAT)
        if plain[-1]["role"] == "assistant":
            raise BadRow("the last one is the assistant's, so there is nothing to answer")
        check_shown(plain, tokenizer)
    except BadRow as error:
        raise ApiError(error.at("messages"), param="messages") from error
    return plain


def flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content given in parts as one text; templates and this engine know no other parts."""
    content = message.get("content")
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise BadRow(f"content = {shown(content)} is neither text nor a list of parts")
        return dict(message)
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    kinds = [part.get("type") if isinstance(part, dict) else part for part in content]
    if kinds != ["text"] * len(content) or not all(isinstance(text, str) for text in texts):
        raise BadRow(f"content has parts {shown(kinds)}", "there is only text")
    return {**message, "content": "".join(map(str, texts))}


def with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of tool calls as objects, which templates write out; OpenAI's are texts of JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise BadRow(f"tool_calls = {shown(calls)} is not a list")
    return {**message, "tool_calls": [read_call(call) for call in calls]}


def read_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not function.get("name"):
        raise BadRow(f"tool_calls holds {shown(call)}", "give type, id and function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            rule = f"the arguments of {shown(function['name'])} are not JSON: {error}"
            raise BadRow(rule) from error
    return {**call, "function": {**function, "arguments": arguments}}


def check_shown(messages: Messages, tokenizer: Tokenizer) -> None:
    """What a template passes over would silently be no part of the conversation: every call is
    given a name of its own, which must then be in the text."""
    marks: dict[str, int] = {}

    def marked(call: Mapping[str, Any], number: int) -> dict[str, Any]:
        marks[mark := f"call-{len(marks)}-{secrets.token_hex(4)}"] = number
        return {**call, "function": {**call["function"], "name": mark}}

    renamed = []
    for number, message in enumerate(messages, 1):
        if other := [field for field in ("function_call", "audio") if message.get(field)]:
            raise BadRow(f"message {number}: {other[0]} is not read", "give tool_calls or content")
        calls = [marked(call, number) for call in message.get("tool_calls") or ()]
        renamed.append({**message, "tool_calls": calls} if calls else message)
    text = render(renamed, tokenizer, for_answer=True) if marks else ""
    for mark, number in marks.items():
        if mark not in text:
            rule = f"the chat template in {tokenizer.folder} does not show tool_calls"
            raise BadRow(f"message {number}: {rule}", "write the call as content")


def check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        rule = f"holds half of a surrogate pair at character {error.start}"
        raise ApiError(Problem(where, rule, "send valid Unicode"), param=where) from error
