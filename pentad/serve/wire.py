"""OpenAI-compatible requests: their fields, and the validation of a body.

An unsupported field that would change the answer is rejected unless its value means "off"; only
labels are ignored. Limits on requests are checked before any work (`ServeLimits`).
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from pentad.core.errors import Problem, raise_problems

MAX_N = 128
MAX_CHOICES = 1024
"""Maximum number of choices over all prompts of a request."""
MAX_TOP = 20
MAX_STOPS = 32
MAX_STOP_CHARS = 1024

LABELS = {
    *("user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key"),
}
"""Fields that do not change answers; accepted without effect."""
OFF: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((False,), "prompts are not sent back; put the prompt before the answer yourself"),
    "best_of": ((), "answers are not ranked; use n"),
    "suffix": (("",), "text is not filled in between"),
    "presence_penalty": ((0,), "penalties are not built"),
    "frequency_penalty": ((0,), "penalties are not built"),
    "repetition_penalty": ((1,), "penalties are not built"),
    "logit_bias": (({},), "logits are not changed"),
    "min_p": ((0,), "is not built; use top_p or top_k"),
    "min_tokens": ((0,), "is not built"),
    "functions": (([],), "give tools"),
    "parallel_tool_calls": ((True,), "the calls of an answer are not limited"),
    "response_format": (({"type": "text"},), "answers are not constrained"),
    "modalities": ((["text"],), "there is only text"),
    "prompt_logprobs": ((0,), "log-probs are those of new tokens"),
}
"""Unsupported fields -> the values without effect, and the reason why others are rejected."""

FORMS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": f"a text of at most {MAX_STOP_CHARS} characters, or a list of at most {MAX_STOPS}",
}
"""Fields that accept several forms."""


class ApiError(Exception):
    """A rejected request: the HTTP status and the content of its error object."""

    def __init__(
        self,
        problem: Problem | str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        closes: bool = False,
    ) -> None:
        """`closes`: whether to close the connection after the answer, because the request was not
        fully read."""
        super().__init__(readable(str(problem)))
        self.status = status
        self.kind = kind
        self.param = None if param is None else readable(param)
        self.code = code
        self.closes = closes

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
TokenIds = list[int]


class Body(BaseModel):
    """Fields common to both kinds of requests."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    model: str
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_CHARS)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def read_prompts(value: object) -> list[str] | list[TokenIds]:
    """Reads the prompts of a request, in any of the four forms."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        if all(isinstance(part, str) for part in value):
            return value
        if is_ids(value):
            return [value]
        if all(isinstance(part, list) and is_ids(part) for part in value):
            return value
    raise ValueError(FORMS["prompt"])


def is_ids(value: list[Any]) -> bool:
    return all(type(part) is int for part in value)


class CompletionBody(Body):
    prompt: Annotated[list[str] | list[TokenIds], PlainValidator(read_prompts)]
    """Read by hand: validation of a long list against four types is slow, with many errors."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_top(self) -> int:
        return self.logprobs or 0


class ChatBody(Body):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto"] = "auto"
    """With none the tools are not in the prompt."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Arguments of the chat template, such as enable_thinking."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def num_top(self) -> int:
        return self.top_logprobs


def read_completion(raw: Mapping[str, Any]) -> CompletionBody:
    return CompletionBody.model_validate(_fields(raw, CompletionBody))


def read_chat(raw: Mapping[str, Any]) -> ChatBody:
    return ChatBody.model_validate(_fields(raw, ChatBody))


def _fields(raw: Mapping[str, Any], kind: type[Body]) -> dict[str, Any]:
    """Returns the relevant fields; null means absent. ApiError for unsupported ones."""
    found: dict[str, Any] = {}
    for name, value in raw.items():
        if value is None or name in LABELS:
            continue
        if name in OFF:
            values, why = OFF[name]
            if value not in values and not (name == "best_of" and value == raw.get("n", 1)):
                problem = Problem(f"{name} = {shown(value)}", why, "leave it out")
                raise ApiError(problem, param=name, code="unsupported_parameter")
            continue
        if name not in kind.model_fields:
            problem = Problem(f"{name} = {shown(value)}", "there is no such field", "leave it out")
            raise ApiError(problem, param=name, code="unknown_parameter")
        found[name] = value
    return found


def as_api_error(error: ValidationError) -> ApiError:
    """Converts the error of the first field with a wrong value."""
    item = error.errors(include_url=False)[0]
    name = str(item["loc"][0])
    if item["type"] == "missing":
        return ApiError(Problem(name, "is missing"), param=name, code="missing_required_parameter")
    path = name + "".join(f"[{part}]" for part in item["loc"][1:] if isinstance(part, int))
    rule = item["msg"][0].lower() + item["msg"][1:]
    if name in FORMS:
        rule = f"must be {FORMS[name]}"
    where = f"{path} = {shown(item['input'])}"
    return ApiError(Problem(where, rule), param=name, code="invalid_value")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError, also for NaN and Infinity, which Python accepts."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def readable(text: str) -> str:
    """Returns a text that can be sent: escapes unpaired surrogates, which JSON may contain."""
    return text.encode(errors="backslashreplace").decode()


def shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


MAX_DEPTH = 64
"""Maximum nesting of lists and objects; templates and error messages recurse into them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """Limits of a server; all are above 0."""

    max_requests: int = 256
    """Maximum concurrent requests; further ones are answered 429 and may be retried."""
    client_share: float = 1.0
    """Maximum share of `max_requests` for one address, so that others are not blocked."""
    max_body_bytes: int = 4 << 20
    max_prompts: int = 128
    """Maximum prompts of one request for completions."""
    max_messages: int = 1024
    """Maximum messages of one conversation, and maximum tool calls in them."""
    max_tools: int = 128
    max_chars: int = 1_000_000
    """Maximum characters of one request, over all its texts; other values, such as ids, count 1."""
    max_client_connections: int = 512
    """Maximum connections of one address. A further one replaces the oldest that has not sent a
    whole request; if all have, it is answered 429."""
    header_timeout_s: float = 10.0
    """Time limit for the headers of each request; then the connection is closed."""
    body_timeout_s: float = 30.0
    """Time limit for the body of a request; then the client is disconnected."""
    write_timeout_s: float = 20.0
    """A client that reads nothing of its answer for this long is disconnected."""

    @property
    def max_client_requests(self) -> int:
        return max(1, int(self.client_share * self.max_requests))

    def __post_init__(self) -> None:
        problems = [
            Problem(f"{field.name} = {getattr(self, field.name)}", "must be above 0")
            for field in fields(self)
            if getattr(self, field.name) <= 0
        ]
        raise_problems(problems)


def check_body(body: bytes, limits: ServeLimits) -> None:
    """Checks a body before it is parsed, which is slow for many small values. Raises ApiError."""
    # Each of these belongs to a value or is a character of a text; a value has at most two.
    if sum(map(body.count, (b",", b"[", b"{"))) > 2 * limits.max_chars:
        raise too_many_chars(limits)


def check_sizes(raw: Mapping[str, Any], limits: ServeLimits) -> None:
    """Checks sizes before anything is validated, rendered or encoded. Raises ApiError."""
    messages = [one for one in listed(raw.get("messages")) if isinstance(one, dict)]
    calls = sum(len(listed(message.get("tool_calls"))) for message in messages)
    prompts = listed(raw.get("prompt"))
    for name, what, found, most in (
        ("prompt", "prompts", len(prompts), limits.max_prompts),
        ("messages", "messages", len(listed(raw.get("messages"))), limits.max_messages),
        ("messages", "tool_calls", calls, limits.max_messages),
        ("tools", "tools", len(listed(raw.get("tools"))), limits.max_tools),
    ):
        is_one = name == "prompt" and prompts and type(prompts[0]) is int
        if found > most and not is_one:
            rule, remedy = f"a request may have {most}", "send several requests"
            problem = Problem(f"{name}: {found} {what}", rule, remedy)
            raise ApiError(problem, param=name, code="too_many_" + what)
    num_chars, depth = size_of(raw, limits.max_chars)
    if num_chars > limits.max_chars:
        raise too_many_chars(limits)
    if depth > MAX_DEPTH:
        rule = f"is nested more than {MAX_DEPTH} levels deep"
        raise ApiError(Problem("request", rule, "flatten it"), code="too_deep")


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def too_many_chars(limits: ServeLimits) -> ApiError:
    rule = f"has more than {limits.max_chars} characters and values, the most this server reads"
    return ApiError(Problem("request", rule, "shorten it"), code="too_many_characters")


def size_of(value: Any, most: int) -> tuple[int, int]:
    """Returns the characters of all contained texts, with 1 for any other value, and the nesting
    depth; stops beyond `most` characters."""
    total, depth, level = 0, -1, [value]
    while level and total <= most:
        total += sum(len(one) if isinstance(one, str) else 1 for one in level)
        within = [one for one in level if isinstance(one, list)]
        for one in level:
            if isinstance(one, dict):
                within += [list(one.keys()), list(one.values())]
        level = [part for one in within for part in one]
        depth += 1
    return total, depth


def name_of(host: str) -> str:
    """Returns the host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_local(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower() == "localhost"
