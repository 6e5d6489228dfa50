"""Qwen2-MoE: Qwen2 attention, and a mixture with a shared expert in the layers the config names."""

from __future__ import annotations

from typing import Any

from pentad.models.config_reader import ConfigReader, ConfigValues, read_mixture
from pentad.models.spec import DECODER, FFN, LAYER, ModelSpec, is_moe, shared_expert
from pentad.weights.map import Rule

DEFAULTS = {
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "sliding_window": 4096,
    "num_local_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}


def slides(layer: int, first: int) -> bool:
    """Windowed layers: every second one of the first layers."""
    return layer % 2 == 0 and layer < first


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    found = read_mixture(read, num_layers)
    shared = {"shared_expert_size": read.whole("shared_expert_intermediate_size")} if found else {}
    return found | shared


SPEC = ModelSpec(
    family="qwen2_moe",
    rules=(
        *DECODER,
        *shared_expert("shared_expert"),
        Rule(FFN + "shared.gate.weight", "1 D", LAYER + "mlp.shared_expert_gate.weight", is_moe),
    ),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        qkv_bias="qkv_bias",
        out_bias=False,
        mlp_bias=False,
        slides=slides,
        has_shared_experts=True,
        mixture=mixture,
    ),
    classes=("Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification"),
)
