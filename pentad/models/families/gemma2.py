"""Gemma 2: Gemma 3 with limited attention scores, without head norms, with windows on every second
layer and one rotary base."""

from __future__ import annotations

from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.families.gemma3_text import LATER_TOKENS, RULES, SMALL_CAP, scales
from pentad.models.spec import ModelSpec, sizes

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
RELEASED: dict[str, Any] = {"tied": True, "rope_theta": 1e4, "max_position": 8192}


def slides(layer: int, first: int) -> bool:
    return layer % 2 == 0


def caps(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    return {**scales(read, dims), "score_cap": read.maybe("attn_logit_softcapping")}


SPEC = ModelSpec(
    family="gemma2",
    rules=RULES,
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        post_norms=True,
        norm_offset=1.0,
        activation=("hidden_activation", "gelu_tanh"),
        more=caps,
        refused=LATER_TOKENS,
        slides=slides,
        window_switch=True,
    ),
    classes=("Gemma2ForCausalLM", "Gemma2ForSequenceClassification"),
    variants={
        "queries scaled": {"query_pre_attn_scalar": 23},
        "scores limited": {"attn_logit_softcapping": 0.7},
        **SMALL_CAP,
        "no limits": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    public={
        f"google/gemma-2-{name}{kind}": sizes(
            *dims, 256000, head_dim=width, query_pre_attn_scalar=divisor, **RELEASED
        )
        for name, width, divisor, dims in (
            ("2b", 256, 256, (2304, 9216, 26, 8, 4)),
            ("9b", 256, 256, (3584, 14336, 42, 16, 8)),
            ("27b", 128, 144, (4608, 36864, 46, 32, 16)),
        )
        for kind in ("", "-it")
    },
)
