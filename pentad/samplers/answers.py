"""Answers of samplers, read strictly: ids, log-probs, ends, experts, and the weights behind each
token."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import BaseModel, NonNegativeInt

from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure
from pentad.core.types import FinishReason, Generation
from pentad.infer.sequence import filled

LOGPROB_ROUNDING = 1e-3
"""A log-prob above 0 by at most this is a sure token in low precision, more is an error."""
NPY = b"\x93NUMPY"
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


def routes_of(
    where: str, told: str | None, answer: Generation, num_prompt: int, dims: ModelDims
) -> np.ndarray | None:
    """`Generation.routes` of what a server says of all its layers and of all tokens but the last,
    which it never computed: base64 of int32 (SGLang) or of an .npy file (vLLM). None for an answer
    that was cut and says nothing."""
    if told is None and answer.finish == "abort":
        return None
    num_tokens = num_prompt + len(answer.ids)
    shape = (num_tokens - 1, dims.num_layers, dims.num_experts_per_token)
    told_TLk = numbers_in(where, told or "")
    if told_TLk.size != math.prod(shape):
        rule = f"{told_TLk.size} came where {num_tokens} tokens have {math.prod(shape)}"
        raise InfraFailure(f"{where}: it does not say which experts each token went to: {rule}")
    layers = [layer for layer in range(dims.num_layers) if dims.is_moe(layer)]
    routes_TLk: np.ndarray = told_TLk.reshape(shape)[:, layers].astype(np.int16)
    ordered = np.sort(routes_TLk, -1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise InfraFailure(f"{where}: it says that a token went to the same expert twice")
    if ordered.size and not 0 <= ordered.min() <= ordered.max() < dims.num_experts:
        rule = f"experts {ordered.min()} to {ordered.max()}"
        raise InfraFailure(f"{where}: it used {rule}, the model has {dims.num_experts}")
    return filled(routes_TLk, num_tokens)


def numbers_in(where: str, text: str) -> np.ndarray:
    try:
        data = base64.b64decode(text, validate=True)
        if not data.startswith(NPY):
            return np.frombuffer(data, "<i4")
        read: np.ndarray = np.load(io.BytesIO(data))
        return read
    except (ValueError, EOFError) as error:
        raise InfraFailure(f"{where}: the experts it used are garbage ({error})") from error


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


def joined(*parts: Generation) -> Generation:
    """Parts of one continuation, as one; it ended as the last part did."""
    whole = Generation([], [], [], parts[-1].finish if parts else "length")
    for part in parts:
        whole.ids += part.ids
        whole.logprobs += part.logprobs
        whole.versions += part.versions
        if part.routes is not None and whole.routes is not None:
            # A token's experts are those with which the one after it was drawn.
            known = len(whole.routes) - 1
            part = replace(part, routes=np.concatenate([whole.routes[:known], part.routes[known:]]))
        whole.routes = whole.routes if part.routes is None else part.routes
    return whole
