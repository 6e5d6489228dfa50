"""The dimensions of a decoder model, read from a HF config without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    """What a decoder is made of. Model files build from it; `plan` counts with it."""

    family: str
    """HF `model_type`, such as qwen3."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Explicit: not hidden_size / num_heads in general."""
    intermediate_size: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """HF `rope_scaling` / `rope_parameters` without theta; empty means none."""
    max_position: int = 32768
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    """Per layer, whether the window applies; empty means nowhere."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[bool, ...] = ()
    """Per layer, whether its ffn is a mixture; empty means nowhere."""
    initializer_range: float = 0.02

    def is_moe(self, layer: int) -> bool:
        return bool(self.moe_layers) and self.moe_layers[layer]
