"""Gemma 3, text: scaled embeddings, norms with weights around 0 before and after attention and ffn,
head norms, gelu, windows on five of six layers, which have a separate rotary base."""

from __future__ import annotations

from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.spec import (
    DECODER,
    FFN_NORM,
    LAYER,
    POST_NORMS,
    ModelSpec,
    around_zero,
    sizes,
    with_sources,
)

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "sliding_window": 4096,
    "rope_theta": 1e6,
}
BEFORE_FFN = {FFN_NORM: LAYER + "pre_feedforward_layernorm.weight"}
RULES = around_zero(with_sources((*DECODER, *POST_NORMS), BEFORE_FFN))
LATER_TOKENS = {"use_bidirectional_attention": "attention to later tokens"}
SMALL_CAP = {"logits limited": {"final_logit_softcapping": 1.7}}
RELEASED: dict[str, Any] = {"tied": True, "head_dim": 256, "sliding_window": 512}


def slides(layer: int, pattern: int) -> bool:
    return (layer + 1) % pattern != 0


def scales(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    """Scores are divided by the root of `query_pre_attn_scalar`, not of a head's width."""
    divisor = read.number("query_pre_attn_scalar", 256.0)
    return {
        "embed_scale": dims.hidden_size**0.5,
        "query_scale": (dims.head_dim / divisor) ** 0.5,
        "logit_cap": read.maybe("final_logit_softcapping"),
    }


SPEC = ModelSpec(
    family="gemma3_text",
    rules=RULES,
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        activation=("hidden_activation", "gelu_tanh"),
        more=scales,
        refused={
            "attn_logit_softcapping": "a limit on attention scores, which transformers ignores,",
            **LATER_TOKENS,
        },
        sliding_theta=("rope_local_base_freq", 1e4),
        slides=slides,
        slides_key=("sliding_window_pattern", 6, 1),
        window_switch=True,
    ),
    classes=("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
    variants={"queries scaled": {"query_pre_attn_scalar": 23}, **SMALL_CAP},
    public={
        "google/gemma-3-270m": sizes(640, 2048, 18, 4, 1, 262144, **RELEASED),
        "google/gemma-3-1b-pt": sizes(1152, 6912, 26, 4, 1, 262144, **RELEASED),
    },
)
