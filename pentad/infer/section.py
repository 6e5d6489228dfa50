"""What the embedded engine is given beside its model."""

from __future__ import annotations

from typing import Literal

from pentad.core.section import Count, Section
from pentad.core.sizes import BLOCK_TOKENS
from pentad.engine.section import LoraConfig
from pentad.rollout.section import RolloutConfig


class SamplerSettings(Section):
    """The block `rollout`, and what a run or a server adds. Device and dtype are those of the model
    it is given."""

    rollout: RolloutConfig = RolloutConfig()
    max_context: Count | None = None
    """Most tokens of one sequence, prompt included. None: what the model's positions allow."""
    lora: LoraConfig | None = None
    """The model it is given is frozen and gets such factors: an install is of them alone."""
    strict: bool = False
    """Log-probs that equal the strict learner's bit for bit, by operations that give a token the
    same numbers in any batch; slower."""
    keep_prefixes: bool = False
    """Keep computed prefixes while the engine is idle. Off, a batch of requests given to an idle
    engine has bitwise the same result whatever ran before it."""
    block_size: Count = BLOCK_TOKENS
    """Tokens in one block of the key-value cache."""
    kv_cache_tokens: Count | None = None
    """Tokens that the key-value cache holds, whatever `kv_cache_gb` says."""
    admit_batch: Count | None = None
    """While sequences run, waiting ones are admitted at least so many at a time. None: a sixteenth
    of those that run with captured graphs, where a step that prefills costs much more than one
    that only decodes, else 1."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Plain torch, or Triton kernels between the matrix products. auto: Triton on a GPU that has
    it."""
    cuda_graphs: bool = True
    """With Triton kernels on a GPU, decode through captured graphs. A mixture of experts does so in
    bf16; in other dtypes its dispatch asks the device for sizes."""
