"""What a client may ask of a server, and the checks that come before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.serve.wire import ApiError

MAX_DEPTH = 64
"""Levels of lists and objects in one another; templates and messages of errors walk them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """Of one server; every one is above 0."""

    max_requests: int = 256
    """Requests under way; further ones are answered 429 and may be tried again."""
    client_share: float = 1.0
    """Of `max_requests`, what one address may have, so that it cannot keep all others out."""
    max_body_bytes: int = 4 << 20
    max_prompts: int = 128
    """Prompts of one request for completions."""
    max_messages: int = 1024
    """Messages of one conversation; as many calls of tools may be in them."""
    max_tools: int = 128
    max_chars: int = 1_000_000
    """Characters of one request, over all its texts; any other value, such as an id, counts 1."""
    max_client_connections: int = 512
    """Connections of one address. A further one takes the place of the oldest that has not sent a
    whole request; if all have, it is answered 429."""
    header_timeout_s: float = 10.0
    """A connection that has not sent a request's head by then, the first or the next, is closed."""
    body_timeout_s: float = 30.0
    """A client that takes longer to send its request is cut off."""
    write_timeout_s: float = 20.0
    """A client that takes nothing of its answer for so long is cut off."""

    @property
    def max_client_requests(self) -> int:
        return max(1, int(self.client_share * self.max_requests))

    def __post_init__(self) -> None:
        problems = [
            Problem(f"{field.name} = {getattr(self, field.name)}", "must be above 0")
            for field in fields(self)
            if getattr(self, field.name) <= 0
        ]
        if problems:
            raise UserError(problems)


def check_body(body: bytes, limits: ServeLimits) -> None:
    """Before it is parsed, which takes long for many small values. Raises ApiError."""
    # Each of these stands for a value or is a character of a text; a value has at most two.
    if sum(map(body.count, (b",", b"[", b"{"))) > 2 * limits.max_chars:
        raise too_many_chars(limits)


def check_sizes(raw: Mapping[str, Any], limits: ServeLimits) -> None:
    """Before anything is validated, rendered or encoded. Raises ApiError."""
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
    """Characters of all texts within, any other value counted as one, and the levels of lists and
    objects; stops beyond `most` characters."""
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
