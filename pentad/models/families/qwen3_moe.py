"""Qwen3-MoE: Qwen3 attention, and a mixture of experts in the layers the config names."""

from __future__ import annotations

from typing import Any

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import ModelSpec, sizes

DEFAULTS = {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
RELEASED: dict[str, Any] = {"head_dim": 128, "norm_topk_prob": True}

SPEC = ModelSpec(
    family="qwen3_moe",
    read_dims=ConfigReader(defaults=DEFAULTS, mlp_bias=False, qk_norm=True, windows="all"),
    classes=("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification"),
    public={
        "Qwen/Qwen3-30B-A3B": sizes(2048, 6144, 48, 32, 4, 151936, **RELEASED),
        "Qwen/Qwen3-235B-A22B": sizes(
            4096, 12288, 94, 64, 4, 151936, moe_intermediate_size=1536, **RELEASED
        ),
    },
)
