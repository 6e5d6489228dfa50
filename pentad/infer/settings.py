"""Settings of the embedded engine, and the limits of its requests: what cannot be served is refused
here and never enters a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pentad.core.errors import Problem, UserError
from pentad.core.sizes import BLOCK_TOKENS, EIGHT_BIT_CACHES, MIN_TEMPERATURE, CacheDtype
from pentad.core.types import Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """Settings of the embedded engine. Device and dtype are those of the model it is given."""

    max_running: int = 256
    """Most sequences decoded together."""
    max_batch_tokens: int | None = None
    """Most tokens in one forward pass; longer prompts are prefilled in chunks. None: 8192 on a CPU
    or without kernels, 32768 on a GPU, where a wide model takes fewer, and prompts that go on from
    tokens in the cache 8192 of them; `max_running` where that is more."""
    max_context: int | None = None
    """Most tokens of one sequence, prompt included. None: what the model's positions allow."""
    block_size: int = BLOCK_TOKENS
    """Tokens in one block of the key-value cache."""
    kv_cache_bytes: int | None = None
    """Memory of the key-value cache. None: enough for `max_running` sequences of `max_context`
    tokens, but at most 1 GiB on a CPU and half of the free memory on a GPU."""
    kv_cache_tokens: int | None = None
    """The same limit in tokens; give one of the two."""
    kv_cache_dtype: CacheDtype = "auto"
    """Keys and values as the model computes them, or in 8 bits with a scale for each token and
    head: half of the memory and of what decoding reads, and log-probs that differ from the
    trainer's by more than rounding of 16 bits."""
    on_update: Literal["continue", "reprefill"] = "continue"
    """What new weights do to sequences under way: they go on with keys and values of the old
    weights, or all their tokens are run again through the new ones."""
    keep_prefixes: bool = False
    """Keep computed prefixes while the engine is idle. Off, a batch of requests given to an idle
    engine has bitwise the same result whatever ran before it."""
    admit_batch: int | None = None
    """While sequences run, waiting ones are admitted at least so many at a time. None: a sixteenth
    of `max_running` with captured graphs, where a step that prefills costs much more than one
    that only decodes, else 1."""
    record_routes: bool = False
    """Of a mixture, keep which experts each token was sent to, and report them with the answer."""
    strict: bool = False
    """Log-probs that equal the strict learner's bit for bit, by operations that give a token the
    same numbers in any batch; slower."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Plain torch, or Triton kernels between the matrix products. auto: Triton on a GPU that has
    it."""
    cuda_graphs: bool = True
    """With Triton kernels on a GPU, decode through captured graphs. A mixture of experts does so in
    bf16; in other dtypes its dispatch asks the device for sizes."""

    def __post_init__(self) -> None:
        problems = [
            Problem(f"sampler.{name} = {value}", "must be at least 1")
            for name, value in (
                ("max_running", self.max_running),
                ("max_batch_tokens", self.max_batch_tokens),
                ("max_context", self.max_context),
                ("block_size", self.block_size),
                ("kv_cache_bytes", self.kv_cache_bytes),
                ("kv_cache_tokens", self.kv_cache_tokens),
                ("admit_batch", self.admit_batch),
            )
            if value is not None and value < 1
        ]
        if self.max_batch_tokens is not None and self.max_batch_tokens < self.max_running:
            problems.append(
                Problem(
                    f"sampler.max_batch_tokens = {self.max_batch_tokens}",
                    f"each of max_running = {self.max_running} sequences needs one token a step",
                    f"give at least {self.max_running}, or lower max_running",
                )
            )
        if self.kv_cache_bytes is not None and self.kv_cache_tokens is not None:
            problems.append(
                Problem(
                    f"sampler.kv_cache_tokens = {self.kv_cache_tokens}",
                    f"kv_cache_bytes = {self.kv_cache_bytes} already limits the cache",
                    "give one of the two",
                )
            )
        if self.strict and self.kv_cache_dtype in EIGHT_BIT_CACHES:
            where = f"sampler.kv_cache_dtype = {self.kv_cache_dtype}"
            rule = "strict = true: a cache in 8 bits gives other log-probs than training"
            problems.append(Problem(where, rule, "leave one of them out"))
        if problems:
            raise UserError(problems)


MIN_TOP_P = 1e-6
"""Less may be 0 in fp32, which keeps no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the engine can hold."""

    vocab_size: int
    max_context: int
    """Most tokens of one sequence, prompt included."""
    max_cached: int
    """Tokens the whole key-value cache holds."""
    can_decode: bool
    """Whether token ids can be turned into text, which stop strings need."""

    def total(self, request: Request) -> int:
        """Number of tokens at which a continuation ends at the latest."""
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
    if problems:
        raise UserError(problems)


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
    for stop in params.stop_ids:
        if not 0 <= stop < limits.vocab_size:
            yield Problem(f"stop_ids: {stop}", outside(limits))
    if "" in params.stop_strings:
        yield Problem("stop_strings: ''", "every text holds it")
    if params.stop_strings and not limits.can_decode:
        yield Problem(
            f"stop_strings = {list(params.stop_strings)}",
            "the sampler cannot turn ids into text",
            "build it with decode=tokenizer.decode",
        )


def outside(limits: RequestLimits) -> str:
    return f"is outside the vocabulary of {limits.vocab_size}"
