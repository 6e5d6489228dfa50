"""EXAONE 4: norms after attention and ffn only, head norms, windows on three of four layers; where
there are windows, the layers without one have no rotary."""

from __future__ import annotations

from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.spec import ATTN_NORM, DECODER, FFN_NORM, POST_NORMS, ModelSpec, sizes, without

DEFAULTS = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def slides(layer: int, pattern: int) -> bool:
    return (layer + 1) % pattern != 0


def unturned(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    if read.hf.get("sliding_window") is None:
        return {}
    none = tuple(dims.window(layer) is None for layer in range(dims.num_layers))
    return {"unturned_layers": none if any(none) else ()}


SPEC = ModelSpec(
    family="exaone4",
    rules=(*without(DECODER, ATTN_NORM, FFN_NORM), *POST_NORMS),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=True,
        pre_norms=False,
        post_norms=True,
        slides=slides,
        slides_key=("sliding_window_pattern", 4, 1),
        window_switch=True,
        more=unturned,
    ),
    classes=("Exaone4ForCausalLM", "Exaone4ForSequenceClassification"),
    variants={
        "no windows": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        "windows on every second layer": {"sliding_window": 5, "sliding_window_pattern": 2},
    },
    public={
        "LGAI-EXAONE/EXAONE-4.0-32B": sizes(
            *(5120, 27392, 64, 40, 8, 102400),
            head_dim=128,
            max_position=131072,
        ),
        "LGAI-EXAONE/EXAONE-4.0-1.2B": sizes(
            *(2048, 4096, 30, 32, 8, 102400),
            tied=True,
            head_dim=64,
            max_position=65536,
            sliding_window=None,
        ),
    },
)
