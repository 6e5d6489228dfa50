"""Ministral: Mistral, with windows on the layers that the config names."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import ModelSpec

DEFAULTS = {
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}


def slides(layer: int, first: int) -> bool:
    return True


SPEC = ModelSpec(
    family="ministral",
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        slides=slides,
        window_switch=True,
    ),
    classes=("MinistralForCausalLM", "MinistralForSequenceClassification"),
    variants={
        "windows on some layers": {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }
    },
)
