"""Answers of samplers, read strictly: ids, log-probs, ends, and the weights behind each token."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, NonNegativeInt

from pentad.core.failures import InfraFailure
from pentad.core.types import FinishReason, Generation

LOGPROB_ROUNDING = 1e-3
"""A log-prob above 0 by at most this is a sure token in low precision, more is an error."""
FINISHES: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VersionSpan(BaseModel):
    """Tokens [start, end) of an answer were drawn by weights of this label."""

    version: str
    start: NonNegativeInt
    end: NonNegativeInt


def versions_of(where: str, spans: Sequence[VersionSpan] | None, num: int) -> list[int]:
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


def flaw_of(answer: Generation, max_new_tokens: int, vocab_size: int) -> str | None:
    """What is wrong with a sampler's answer, in words; None if nothing is."""
    num = len(answer.ids)
    if answer.finish == "abort":
        return f"aborted after {num} tokens"
    if answer.finish not in ("stop", "length"):
        return f"finish = {answer.finish!r} is none of stop, length, abort"
    if not num == len(answer.logprobs) == len(answer.versions):
        counts = f"{len(answer.logprobs)} log-probs and {len(answer.versions)} versions"
        return f"{counts} came for {num} ids"
    if not 1 <= num <= max_new_tokens:
        return f"{num} tokens came where 1 to {max_new_tokens} were asked for"
    ids, logprobs, versions = map(np.array, (answer.ids, answer.logprobs, answer.versions))
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        t = outside[0]
        return f"token {t}: id {ids[t]} is outside the vocabulary of {vocab_size}"
    wrong = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= LOGPROB_ROUNDING)))
    if len(wrong):
        t = wrong[0]
        return f"token {t}: log-prob {logprobs[t]} is not a finite number of at most 0"
    if versions[0] < 0 or (np.diff(versions) < 0).any():
        return f"weight versions {sorted(set(answer.versions))} go backwards or below 0"
    return None
