"""Mistral: Llama without biases, and with a window on every layer if one is set."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import ModelSpec

DEFAULTS = {
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}

SPEC = ModelSpec(
    family="mistral",
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        windows="all",
        window_switch=True,
    ),
    classes=("MistralForCausalLM", "MistralForSequenceClassification"),
)
