"""What a client may ask of a server, and the checks that come before any work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.serve.wire import ApiError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """Of one server; every one is above 0."""

    max_requests: int = 256
    """Requests under way; further ones are answered 429 and may be tried again."""
    max_body_bytes: int = 4 << 20
    max_prompts: int = 128
    """Prompts of one request for completions."""
    max_messages: int = 1024
    """Messages of one conversation."""
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
    for name, what, most in (
        ("prompt", "prompts", limits.max_prompts),
        ("messages", "messages", limits.max_messages),
    ):
        value = raw.get(name)
        is_one = name == "prompt" and isinstance(value, list) and value and type(value[0]) is int
        if isinstance(value, list) and len(value) > most and not is_one:
            rule = f"a request may have {most}"
            problem = Problem(f"{name}: {len(value)} {what}", rule, "send several requests")
            raise ApiError(problem, param=name, code="too_many_" + what)
    if count_chars(raw, limits.max_chars) > limits.max_chars:
        raise too_many_chars(limits)


def too_many_chars(limits: ServeLimits) -> ApiError:
    rule = f"has more than {limits.max_chars} characters and values, the most this server reads"
    return ApiError(Problem("request", rule, "shorten it"), code="too_many_characters")


def count_chars(value: Any, most: int) -> int:
    """Characters of all texts within, any other value counted as one; stops beyond `most`."""
    total, left = 0, [value]
    while left and total <= most:
        one = left.pop()
        total += len(one) if isinstance(one, str) else 1
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            left += one
    return total
