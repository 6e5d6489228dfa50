"""Qwen3.5, text: the layers of Qwen3-Next with dense ffns and separate projections in files."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader, read_linear
from pentad.models.families.qwen3_next import DEFAULTS
from pentad.models.spec import (
    DELTA_PLAN,
    GATED_DECODER,
    LAYER,
    ModelSpec,
    around_zero,
    delta_net,
)
from pentad.weights.map import Rows

PLACE = LAYER + "linear_attn."
PROJECTIONS = {
    name: Rows(PLACE + "in_proj_qkv.weight", "LK+LK+LV", part) for part, name in enumerate("qkv")
} | {name: f"{PLACE}in_proj_{name}.weight" for name in "zba"}

SPEC = ModelSpec(
    family="qwen3_5_text",
    rules=(*around_zero(GATED_DECODER), *delta_net(PROJECTIONS)),
    plan=DELTA_PLAN,
    read_dims=ConfigReader(
        defaults=DEFAULTS | {"num_key_value_heads": 4},
        mlp_bias=False,
        qk_norm=True,
        norm_offset=1.0,
        partial_rotary=True,
        windows="none",
        attn_gate=True,
        linear=read_linear,
    ),
    classes=("Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification"),
    # Layers that predict further tokens are not trained, so a saved folder has none.
    ignored=("mtp.*",),
)
