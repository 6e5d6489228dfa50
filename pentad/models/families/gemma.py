"""Gemma: Llama with scaled embeddings, norms with weights around 0, gelu, and wide heads."""

from __future__ import annotations

from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.families.gemma3_text import LATER_TOKENS
from pentad.models.spec import DECODER, ModelSpec, around_zero, sizes

DEFAULTS = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}


def scales(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    return {"embed_scale": dims.hidden_size**0.5}


SPEC = ModelSpec(
    family="gemma",
    rules=around_zero(DECODER),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        norm_offset=1.0,
        activation=("hidden_act", "gelu_tanh"),
        more=scales,
        refused=LATER_TOKENS,
        windows="none",
    ),
    classes=("GemmaForCausalLM", "GemmaForSequenceClassification"),
    public={
        f"google/gemma-{name}{kind}": sizes(
            *dims, 256000, tied=True, rope_theta=1e4, max_position=8192, head_dim=256
        )
        for name, dims in (
            ("2b", (2048, 16384, 18, 8, 1)),
            ("7b", (3072, 24576, 28, 16, 16)),
        )
        for kind in ("", "-it")
    },
)
