"""Hunyuan, dense (0.5B to 7B): Llama with head norms after rotary, whose base `alpha` stretches."""

from __future__ import annotations

from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.spec import ATTN, DECODER, LAYER, ModelSpec, with_sources

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "pad_token_id": 0}
NORMS = {
    ATTN + "q_norm.weight": LAYER + "self_attn.query_layernorm.weight",
    ATTN + "k_norm.weight": LAYER + "self_attn.key_layernorm.weight",
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 1.0, "alpha": 50.0}


def rotary(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    """`dynamic` with an alpha is plain rotary with a larger base, at all supported lengths."""
    found: dict[str, Any] = {"norms_turned": True}
    scaling = dims.rope_scaling
    if scaling.get("rope_type") != "dynamic" or not scaling.get("alpha") or dims.head_dim < 4:
        return found
    settings = ConfigValues(scaling)
    alpha = settings.number("alpha", 1.0)
    read.problems += settings.problems
    theta = dims.rope_theta * alpha ** (dims.head_dim / (dims.head_dim - 2))
    return {**found, "rope_theta": theta, "rope_scaling": {}}


SPEC = ModelSpec(
    family="hunyuan_v1_dense",
    rules=with_sources(DECODER, NORMS),
    read_dims=ConfigReader(
        defaults=DEFAULTS, mlp_bias=False, qk_norm=True, windows="none", more=rotary
    ),
    classes=("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1ForSequenceClassification"),
    variants={"a stretched base": {"rope_parameters": ALPHA}},
)
