"""What both servers say of the weights behind an answer, read strictly."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import BaseModel, NonNegativeInt

from pentad.core.types import FinishReason
from pentad.rollout.failures import InfraFailure

FINISHES: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class Span(BaseModel):
    """Tokens [start, end) of an answer were drawn by weights of this label."""

    version: str
    start: NonNegativeInt
    end: NonNegativeInt


def versions_of(where: str, spans: Sequence[Span] | None, num: int) -> list[int]:
    """The weight version of each of `num` tokens; installs label weights with their number."""
    if spans is None:
        raise InfraFailure(f"{where}: it does not say which weights drew the tokens")
    versions: list[int] = []
    for span in spans:
        is_next = span.start == len(versions) and span.start <= span.end <= num
        if not is_next or not re.fullmatch(r"[0-9]{1,18}", span.version):
            told = f"weights {span.version!r} drew tokens {span.start} to {span.end}"
            raise InfraFailure(f"{where}: {told}, which nobody installed")
        versions += [int(span.version)] * (span.end - span.start)
    if len(versions) != num:
        raise InfraFailure(f"{where}: {len(versions)} versions came for {num} tokens")
    return versions


def finish_of(where: str, told: str | None) -> FinishReason:
    finish = FINISHES.get(told)
    if finish is None:
        raise InfraFailure(f"{where}: a generation ended by {told!r}")
    return finish


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, (0, 5, 23) of 0.5.23.post1."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def dotted(number: Sequence[int]) -> str:
    return ".".join(map(str, number))
