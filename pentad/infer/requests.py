"""Limits of requests: rejects requests that cannot be served, before they enter a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pentad.core.errors import Problem, raise_problems
from pentad.core.sizes import MIN_TEMPERATURE
from pentad.core.types import Request, SamplingParams

MIN_TOP_P = 1e-6
"""Minimum top_p: smaller values may be 0 in fp32, which would keep no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of an engine."""

    vocab_size: int
    max_context: int
    """Maximum tokens of one sequence, prompt included."""
    max_cached: int
    """Number of tokens that fit into the key-value cache."""
    can_decode: bool
    """Whether token ids can be decoded to text, which stop strings require."""

    def total(self, request: Request) -> int:
        """Maximum number of tokens of the request, prompt included."""
        wanted = len(request.prompt_ids) + request.params.max_new_tokens
        return min(wanted, self.max_context)


def check_request(request: Request, limits: RequestLimits) -> None:
    """Raises one UserError with every problem of the request."""
    problems = [*prompt_problems(request, limits), *params_problems(request.params, limits)]
    if not request.seeds:
        problems.append(
            Problem(f"request {request.id}: n = 0", "no seeds", "give one per continuation")
        )
    if not problems and limits.total(request) > limits.max_cached:
        problems.append(
            Problem(
                f"request {request.id}: {limits.total(request)} tokens",
                f"prompt and new tokens never fit the key-value cache of {limits.max_cached}",
                "lower max_new_tokens or raise the cache's memory",
            )
        )
    raise_problems(problems)


def prompt_problems(request: Request, limits: RequestLimits) -> Iterator[Problem]:
    where, ids = f"request {request.id}", request.prompt_ids
    if not ids:
        yield Problem(f"{where}: prompt", "is empty", "give at least one token id")
        return
    if len(ids) >= limits.max_context:
        yield Problem(
            f"{where}: prompt of {len(ids)} tokens",
            f"leaves no room for a new one in a context of {limits.max_context}",
        )
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        bad = next(i for i in ids if not 0 <= i < limits.vocab_size)
        yield Problem(f"{where}: prompt id {bad}", outside(limits))


def params_problems(params: SamplingParams, limits: RequestLimits) -> Iterator[Problem]:
    if params.max_new_tokens < 1:
        yield Problem(f"max_new_tokens = {params.max_new_tokens}", "must be at least 1")
    is_warm = math.isfinite(params.temperature) and params.temperature >= MIN_TEMPERATURE
    if params.temperature != 0 and not is_warm:
        rule = f"must be 0 (greedy) or at least {MIN_TEMPERATURE}"
        yield Problem(f"temperature = {params.temperature}", rule)
    if not MIN_TOP_P <= params.top_p <= 1:
        yield Problem(f"top_p = {params.top_p}", f"must be at least {MIN_TOP_P} and at most 1")
    if params.top_k < 0:
        yield Problem(f"top_k = {params.top_k}", "must be 0 (no limit) or positive")
    if not 0 <= params.num_top <= limits.vocab_size:
        yield Problem(f"num_top = {params.num_top}", f"must be 0 to {limits.vocab_size}")
    stop_ids = params.stop_ids  # there may be thousands
    if stop_ids and not 0 <= min(stop_ids) <= max(stop_ids) < limits.vocab_size:
        for stop in stop_ids:
            if not 0 <= stop < limits.vocab_size:
                yield Problem(f"stop_ids: {stop}", outside(limits))
    if "" in params.stop_strings:
        yield Problem("stop_strings: ''", "every text contains it")
    if params.stop_strings and not limits.can_decode:
        yield Problem(
            f"stop_strings = {list(params.stop_strings)}",
            "the sampler cannot decode ids to text",
            "build it with decode=tokenizer.decode",
        )


def outside(limits: RequestLimits) -> str:
    return f"is outside the vocabulary of {limits.vocab_size}"
