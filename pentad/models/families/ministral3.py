"""Ministral 3 (text): Mistral with yarn, and queries that grow with the position as in Llama 4."""

from __future__ import annotations

from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import (
    MAX_POSITION,
    OLD_LENGTH,
    ConfigReader,
    ConfigValues,
    rope_settings,
)
from pentad.models.spec import ModelSpec

BETA = "llama_4_scaling_beta"
NOT_OF_ROTARY = {BETA, "max_position_embeddings"}
"""Keys among the rotary settings that rotary does not read."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    OLD_LENGTH: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 11,
    "rope_parameters": YARN,
}


def growth(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    """Query growth settings, which transformers requires for every kind of rotary embedding."""
    key, given = rope_settings(read.hf)
    settings = {OLD_LENGTH: None, **given, **dims.rope_scaling}
    if settings[OLD_LENGTH] is None and settings.get("rope_type") in ("yarn", "llama3"):
        settings[OLD_LENGTH] = dims.max_position
    rule = "missing: the family's attention multiplies queries by a factor of their position"
    for name in (BETA, OLD_LENGTH):
        read.must(settings.get(name) is not None, f"{key}.{name}", settings.get(name), rule)
    rope = ConfigValues(settings)
    beta = 0.0 if settings.get(BETA) == 0 else rope.number(BETA, 0.1)
    step = rope.whole(OLD_LENGTH, 1, most=MAX_POSITION)
    read.problems += rope.problems
    scaling = {k: v for k, v in dims.rope_scaling.items() if k not in NOT_OF_ROTARY}
    return {"rope_scaling": scaling, "query_growth": beta, "query_growth_step": step}


SPEC = ModelSpec(
    family="ministral3",
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        windows="all",
        window_switch=True,
        more=growth,
    ),
    classes=("Ministral3ForCausalLM", "Ministral3ForSequenceClassification"),
)
