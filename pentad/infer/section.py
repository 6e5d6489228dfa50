"""Settings of the embedded engine besides its model."""

from __future__ import annotations

from typing import Literal

from pentad.core.section import Count, Section
from pentad.core.sizes import BLOCK_TOKENS
from pentad.engine.section import LoraConfig
from pentad.rollout.section import RolloutConfig


class SamplerSettings(Section):
    """The block `rollout`, and values added by a run or a server. Device and dtype are those of the
    model."""

    rollout: RolloutConfig = RolloutConfig()
    max_context: Count | None = None
    """Maximum tokens of one sequence, prompt included. None: the model's limit of positions."""
    lora: LoraConfig | None = None
    """Factors added to the frozen model; then installs contain only these."""
    strict: bool = False
    """Log-probs are bitwise equal to the strict learner's, by batch-invariant operations;
    slower."""
    keep_prefixes: bool = False
    """Keeps computed prefixes while the engine is idle. If off, the result of a batch of requests
    sent to an idle engine does not depend on earlier requests, bitwise."""
    block_size: Count = BLOCK_TOKENS
    """Tokens in one block of the key-value cache."""
    kv_cache_tokens: Count | None = None
    """Number of tokens in the key-value cache; overrides `kv_cache_gb`."""
    admit_batch: Count | None = None
    """While sequences run, waiting ones are admitted at least this many at a time. None: a
    sixteenth of the running ones with captured graphs, where a step with a prefill costs much more
    than one that only decodes, else 1."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Plain torch, or Triton kernels between the matrix products. auto: Triton if the device is a
    GPU that supports it."""
    cuda_graphs: bool = True
    """With Triton kernels on a GPU, decodes with captured graphs. A mixture of experts does so in
    bf16; in other dtypes its dispatch reads sizes from the device."""
    steps_together: Count = 4
    """Decode steps that are launched together on a GPU, so that the host works once for all of
    them. 1 if requests wait, stream or have stop strings: then the host decides after each
    step."""
    shares_prompts: bool = True
    """With Triton kernels, rows of a decode step that share the blocks of a long prompt read them
    together."""
