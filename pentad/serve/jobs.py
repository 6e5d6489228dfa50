"""Makes a sampler's job of a request: renders the conversation to ids once, checks limits, sets
seeds."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.core.seeds import derive_seed
from pentad.core.types import Request, SamplingParams
from pentad.data.render import (
    TOOL_CALL,
    BadRow,
    DataSource,
    encode_prompts,
    is_tool,
    messages_of,
    render,
)
from pentad.data.section import DatasetConfig
from pentad.data.tokenizer import Tokenizer, check_template_args
from pentad.infer.requests import RequestLimits, check_request
from pentad.serve.wire import (
    MAX_CHOICES,
    MAX_DEPTH,
    ApiError,
    ChatBody,
    CompletionBody,
    parse_json,
    shown,
    size_of,
)

CHAT = DataSource(data=DatasetConfig(messages_key="messages"), key="messages")
ROLES = {"system": "system", "developer": "system"} | {r: r for r in ("user", "assistant", "tool")}
"""Role of a message -> role in templates."""
CALL_START = "<tool_call>"
"""First characters of a tool call in parsed answers: the format of the Hermes and Qwen
templates."""


@dataclass(frozen=True, slots=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    """The tools in the prompt."""
    reads_calls: bool
    """Whether tool calls in the answer are parsed."""
    template_args: Mapping[str, Any]


def read_conversation(body: ChatBody, tokenizer: Tokenizer) -> Conversation:
    """Reads the conversation; raises ApiError for parts that the chat template does not render."""
    if not tokenizer.has_chat_template:
        rule = f"the tokenizer in {tokenizer.folder} has no chat template"
        raise ApiError(Problem("messages", rule, "use /v1/completions"), param="messages")
    tools = read_tools(body.tools) if body.tool_choice == "auto" else []
    given, name = body.chat_template_kwargs, "chat_template_kwargs"
    try:
        check_template_args(tokenizer.inner, given, tokenizer.folder, name)
    except UserError as error:
        raise ApiError(error.problems[0], param=name, code="unsupported_parameter") from error
    try:
        messages = plain_messages(body.messages)
        check_shown(messages, tools, tokenizer)
    except BadRow as error:
        raise ApiError(error.at("messages"), param="messages") from error
    reads_calls = bool(tools) and CALL_START in str(tokenizer.inner.chat_template)
    return Conversation(messages, tools, reads_calls, given)


def chat_ids(conversation: Conversation, tokenizer: Tokenizer) -> list[int]:
    try:
        text = render(
            conversation.messages,
            tokenizer,
            for_answer=True,
            tools=conversation.tools,
            template_args=conversation.template_args,
        )
    except BadRow as error:
        raise ApiError(error.at("messages"), param="messages") from error
    check_unicode(text, "messages")
    return encode_prompts([text], CHAT, tokenizer)[0]


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    for index, tool in enumerate(tools):
        if not is_tool(tool):
            rule = "is not an object with type = function and a function with a name"
            raise ApiError(Problem(f"tools[{index}] = {shown(tool)}", rule), param="tools")
    return [dict(tool) for tool in tools]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages with roles and texts as templates expect them. Raises BadRow."""
    flattened = [with_calls(flat(message)) for message in messages]
    plain = [dict(message) for message in messages_of({"messages": flattened}, "messages", CHAT)]
    for number, message in enumerate(plain, 1):
        if message["role"] not in ROLES:
            rule = f"message {number}: role = {shown(message['role'])} is none of"
            raise BadRow(f"{rule} {', '.join(ROLES)}")
        message["role"] = ROLES[message["role"]]
        for field in ("function_call", "audio"):
            if message.get(field):
                raise BadRow(f"message {number}: {field} is not read", "give content or tool_calls")
    if plain[-1]["role"] == "assistant":
        raise BadRow("the last one is the assistant's, so there is nothing to answer")
    return plain


def flat(message: Mapping[str, Any]) -> dict[str, Any]:
    """Joins content parts to one text; templates and this engine support only text parts."""
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
    """Converts arguments of tool calls to objects, which templates expect; in OpenAI's format they
    are JSON texts."""
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
            arguments = parse_json(arguments)
        except ValueError as error:
            rule = f"the arguments of {shown(function['name'])} are not JSON: {error}"
            raise BadRow(rule) from error
        if size_of(arguments, len(function["arguments"]))[1] > MAX_DEPTH:
            rule = f"are nested more than {MAX_DEPTH} levels deep"
            raise BadRow(f"the arguments of {shown(function['name'])} {rule}", "flatten them")
    return {**call, "function": {**function, "arguments": arguments}}


def check_shown(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> None:
    """Rejects conversations that the template would silently shorten: replaces every tool, every
    call and every text of a system or tool message by a mark, which must be rendered."""
    missing: dict[str, ApiError] = {}

    def mark(where: str, what: str, remedy: str, param: str) -> str:
        rule = f"the chat template in {tokenizer.folder} does not show {what}"
        found = f"mark-{len(missing)}-{secrets.token_hex(4)}"
        missing[found] = ApiError(Problem(where, rule, remedy), param=param)
        return found

    def renamed(item: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {**item, "function": {**item["function"], "name": name}}

    marked = []
    for number, message in enumerate(messages, 1):
        where, changed = f"messages: message {number}", dict(message)
        if message["role"] in ("system", "tool") and message.get("content"):
            what = f"messages of the role {message['role']}"
            changed["content"] = mark(where, what, "write it as a user message", "messages")
        if calls := message.get("tool_calls"):
            given = (where, "tool_calls", "write the call as content", "messages")
            changed["tool_calls"] = [renamed(call, mark(*given)) for call in calls]
        marked.append(changed)
    given = ("tools", "tools", "put them in a message", "tools")
    named = [renamed(tool, mark(*given)) for tool in tools]
    if missing:
        text = render(marked, tokenizer, for_answer=True, tools=named)
        for found, error in missing.items():
            if found not in text:
                raise error


def read_calls(text: str, ids: Sequence[int]) -> tuple[str, list[dict[str, Any]]]:
    """Returns the text outside of the calls, and the calls in OpenAI's format; no calls if one of
    them is not an object with name and arguments. An incomplete call counts as text. Call ids are
    derived from `ids`, so that equal answers have equal ids."""
    calls = []
    for number, found in enumerate(TOOL_CALL.findall(text)):
        try:
            call = parse_json(found)
        except ValueError:
            return text, []
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
            return text, []
        function = {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
        name = f"call_{hashlib.sha256(repr((number, *ids)).encode()).hexdigest()[:24]}"
        calls.append({"id": name, "type": "function", "function": function})
    if not calls:
        return text, []
    before, *between = TOOL_CALL.split(text)[::2]
    return before + "".join(part for part in between if part.strip()), calls


def check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        rule = f"holds half of a surrogate pair at character {error.start}"
        raise ApiError(Problem(where, rule, "send valid Unicode"), param=where) from error


DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat answer may fill the context."""
PLAIN = DataSource(data=DatasetConfig(), key="prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An HTTP request, ready to run: a sampler's request for each prompt, with n choices."""

    body: ChatBody | CompletionBody
    id: str
    requests: tuple[Request, ...]
    reads_calls: bool = False
    """Whether tool calls in the answer are parsed."""

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)

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
    return build_job(body, prompts, max_new, tokenizer, limits)


def chat_job(body: ChatBody, tokenizer: Tokenizer, limits: RequestLimits) -> Job:
    limit = chat_limit(body)
    if body.top_logprobs and not body.logprobs:
        problem = Problem(f"top_logprobs = {body.top_logprobs}", "needs logprobs = true")
        raise ApiError(problem, param="top_logprobs")
    conversation = read_conversation(body, tokenizer)
    ids = chat_ids(conversation, tokenizer)
    room = min(limits.max_context, limits.max_cached) - len(ids)
    max_new = limit or max(room, 1)
    reads_calls = conversation.reads_calls
    return build_job(body, [ids], max_new, tokenizer, limits, reads_calls=reads_calls)


def chat_limit(body: ChatBody) -> int | None:
    """Returns the maximum number of new tokens, given by either of two names."""
    limit = body.max_completion_tokens or body.max_tokens
    if body.max_tokens not in (None, limit):
        where = f"max_tokens = {body.max_tokens}"
        rule = f"max_completion_tokens = {body.max_completion_tokens} is different"
        raise ApiError(Problem(where, rule, "give one of the two"), param="max_tokens")
    return limit


def build_job(
    body: ChatBody | CompletionBody,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    *,
    reads_calls: bool = False,
) -> Job:
    """Builds the job; raises ApiError for requests that the engine cannot serve."""
    for ids in prompts:
        check_length(len(ids), max_new_tokens, limits)
    own_ends = () if body.ignore_eos else tokenizer.stop_ids
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=min(max(body.top_k, 0), limits.vocab_size),  # some clients send -1 for no limit
        stop_ids=tuple(dict.fromkeys((*own_ends, *body.stop_token_ids))),
        stop_strings=body.stop_strings,
        num_top=min(body.num_top, limits.vocab_size),
    )
    name = f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{secrets.token_hex(12)}"
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
    return Job(body=body, id=name, requests=requests, reads_calls=reads_calls)


def check_length(num_prompt: int, max_new_tokens: int, limits: RequestLimits) -> None:
    if num_prompt + max_new_tokens <= limits.max_context:
        return
    where = f"prompt of {num_prompt} tokens and {max_new_tokens} new ones"
    rule = f"do not fit the context of {limits.max_context} tokens"
    room = limits.max_context - num_prompt
    remedy = f"request at most {room} new ones" if room > 0 else "shorten the prompt"
    raise ApiError(Problem(where, rule, remedy), param="prompt", code="context_length_exceeded")


def prompt_ids(prompts: list[str] | list[list[int]], tokenizer: Tokenizer) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for index, text in enumerate(texts):
        check_unicode(text, f"prompt[{index}]" if len(texts) > 1 else "prompt")
    return encode_prompts(texts, PLAIN, tokenizer) + [p for p in prompts if isinstance(p, list)]
