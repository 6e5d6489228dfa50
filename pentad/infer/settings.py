"""Settings of the embedded engine: limits, memory, and what new weights do to open work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pentad.core.errors import Problem, UserError
from pentad.core.sizes import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """Settings of the embedded engine. Device and dtype are those of the model it is given."""

    max_running: int = 256
    """Most sequences decoded together."""
    max_batch_tokens: int = 8192
    """Most tokens in one forward pass; longer prompts are prefilled in chunks."""
    max_context: int | None = None
    """Most tokens of one sequence, prompt included. None: what the model's positions allow."""
    block_size: int = BLOCK_TOKENS
    """Tokens in one block of the key-value cache."""
    kv_cache_bytes: int | None = None
    """Memory of the key-value cache. None: enough for `max_running` sequences of `max_context`
    tokens, but at most 1 GiB on a CPU and half of the free memory on a GPU."""
    kv_cache_tokens: int | None = None
    """The same limit in tokens; give one of the two."""
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
        if self.max_batch_tokens < self.max_running:
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
        if problems:
            raise UserError(problems)
