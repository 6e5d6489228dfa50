"""The OpenAI-compatible requests: which fields there are, and what is wrong with a body.

A field that would change the answer and is not built is refused unless its value means "off";
nothing is ignored but what is only a label.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from pentad.core.errors import Problem

MAX_N = 128
MAX_CHOICES = 1024
"""Over all prompts of one request."""
MAX_TOP = 20
MAX_STOPS = 32
MAX_STOP_CHARS = 1024

LABELS = {
    *("user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key"),
}
"""Fields that change no answer; accepted and without effect."""
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
"""Fields that are not built -> the values that ask for nothing, and why others are refused."""

FORMS = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": f"a text of at most {MAX_STOP_CHARS} characters, or a list of at most {MAX_STOPS}",
}
"""Fields that may be given in several ways."""


class ApiError(Exception):
    """A request that gets no answer: the HTTP status and what its error object says."""

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
        """`closes`: the rest of the request is not read, so the connection ends with the answer."""
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
    """What both kinds of request have in common."""

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
    """One entry a prompt, whichever of the four forms was used."""
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
    """Read by hand: to try four forms on a long list would take long and end in many errors."""
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
    """With none the model is not shown the tools."""
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
    """The fields that matter; null means absent. Raises ApiError on those that are not built."""
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
    """The first field with a wrong value."""
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
    """Raises ValueError, also on what Python reads and JSON does not have: NaN and Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def readable(text: str) -> str:
    """Can be sent: halves of surrogate pairs, which JSON may hold, are spelt out."""
    return text.encode(errors="backslashreplace").decode()


def shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
