"""MiniMax-M2: queries and keys normed over all heads, rotary over part of a head, and in every
layer a mixture routed by sigmoid with a selection bias."""

from __future__ import annotations

from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.families import mixtral
from pentad.models.families.olmo2 import WIDE_NORMS
from pentad.models.spec import ModelSpec, selection_bias, sizes, without

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "rope_theta": 5e6,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
BUILT = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "mtp_transformer_layers": 1,
}
"""Keys of released configs, which the code of the released weights reads."""
HALF = {"rope_type": "default", "rope_theta": 333.0, "partial_rotary_factor": 0.5}


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    read.fixed({**BUILT, "attn_type_list": [1] * num_layers})
    num_mtp_layers = read.whole("num_mtp_modules", 0, 0)
    own = {"router_score": "sigmoid", "router_bias": True, "num_mtp_layers": num_mtp_layers}
    return {**mixtral.mixture(read, num_layers), **own}


def rotary(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    """Reads `rotary_dim` of released configs, which transformers 5.17 ignores."""
    if read.hf.get("rotary_dim") is None:
        return {}
    width = read.whole("rotary_dim", least=2)
    rule = f"must be even, and at most head_dim = {dims.head_dim}"
    read.must(width % 2 == 0 and width <= dims.head_dim, "rotary_dim", width, rule)
    rule = f"must be the {dims.rotary_dim} numbers of partial_rotary_factor"
    read.must(dims.rotary_dim in (0, width), "rotary_dim", width, rule)
    return {"rotary_dim": 0 if width == dims.head_dim else width}


SPEC = ModelSpec(
    family="minimax_m2",
    rules=(
        *without(mixtral.RULES, *(rule.target for rule in WIDE_NORMS)),
        *WIDE_NORMS,
        selection_bias(mixtral.SPARSE + "e_score_correction_bias"),
    ),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=True,
        wide_qk_norm=True,
        partial_rotary=True,
        windows="none",
        mixture=mixture,
        more=rotary,
        refused=mixtral.NOISE,
    ),
    # transformers has no scalar model of it; the second is how it would be called.
    classes=("MiniMaxM2ForCausalLM", "MiniMaxM2ForSequenceClassification"),
    # The layers that predict further tokens are not trained, so a saved folder has none.
    ignored=("model.layers.{n}.*",),
    saved_config={"num_mtp_modules": 0},
    variants={"half a head turned": {"head_dim": 16, "rope_parameters": HALF}},
    public={
        "MiniMaxAI/MiniMax-M2": sizes(
            *(3072, 1536, 62, 48, 8, 200064),
            rope_theta=5e6,
            max_position=196608,
            rotary_dim=64,
            num_mtp_modules=3,
        )
    },
)
