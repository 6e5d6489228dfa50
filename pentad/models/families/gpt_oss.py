"""gpt-oss: attention sinks, windows on every second layer, biases everywhere, experts with a
clamped activation, which are stacked in files, with interleaved columns of gate and up."""

from __future__ import annotations

from typing import Any

from pentad.core.dims import CLAMP_LIMIT
from pentad.models.config_reader import ConfigReader, ConfigValues, read_mixture
from pentad.models.spec import (
    ATTN,
    DECODER,
    DECODER_PLAN,
    FFN,
    LAYER,
    ModelSpec,
    has_sinks,
    sizes,
    with_sources,
    without,
)
from pentad.weights.map import Rule, Transposed

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {
    "num_local_experts": 128,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_parameters": YARN,
}
EXPERTS = LAYER + "mlp.experts."
RULES = (
    *with_sources(
        without(DECODER, FFN + "experts.gate_up"),
        {
            FFN + "router.weight": LAYER + "mlp.router.weight",
            FFN + "experts.down": Transposed(EXPERTS + "down_proj"),
        },
    ),
    Rule(FFN + "experts.gate_up", "E 2M D", Transposed(EXPERTS + "gate_up_proj")),
    Rule(FFN + "experts.gate_up_bias", "E 2M", EXPERTS + "gate_up_proj_bias", init="zeros"),
    Rule(FFN + "down_bias", "R D", EXPERTS + "down_proj_bias", init="zeros"),
    Rule(FFN + "router.offset", "R", LAYER + "mlp.router.bias"),
    Rule(ATTN + "sinks", "H", LAYER + "self_attn.sinks", has_sinks),
)


def slides(layer: int, first: int) -> bool:
    return layer % 2 == 0


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    """Mixture in every layer; weights are a softmax over the chosen experts' logits only."""
    limit = read.number("swiglu_limit", CLAMP_LIMIT)
    read.must(limit == CLAMP_LIMIT, "swiglu_limit", limit, f"transformers has {CLAMP_LIMIT}")
    own = {"norm_topk_prob": True, "moe_bias": True, "moe_layers": (True,) * num_layers}
    width = read.whole("intermediate_size")
    return {**read_mixture(read, num_layers), "moe_intermediate_size": width, **own}


SPEC = ModelSpec(
    family="gpt_oss",
    rules=RULES,
    plan={**DECODER_PLAN, "H": "tp", "2M": "etp"},
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        attn_sinks=True,
        activation=("hidden_act", "clamped"),
        slides=slides,
        window_switch=True,
        mixture=mixture,
    ),
    classes=("GptOssForCausalLM", "GptOssForSequenceClassification"),
    variants={"no biases of projections": {"attention_bias": False}},
    public={
        f"openai/gpt-oss-{name}": sizes(
            *(2880, 2880, num_layers, 64, 8, 201088),
            rope_theta=150000.0,
            max_position=131072,
            num_local_experts=num_experts,
        )
        for name, num_layers, num_experts in (("20b", 24, 32), ("120b", 36, 128))
    },
)
