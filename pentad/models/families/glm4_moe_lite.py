"""GLM-4-MoE-Lite (GLM-4.7-Flash): layers as in DeepSeek-V3, the dense ones by `mlp_layer_types`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.families.deepseek_v3 import SPEC as DEEPSEEK
from pentad.models.families.deepseek_v3 import checked_mixture, latents, scales
from pentad.models.spec import sizes

DEFAULTS = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rope_interleave": True,
}
KINDS = ("dense", "sparse")
IN_THE_MIDDLE = {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": None}


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    """Without the list the first layer is dense; `first_k_dense_replace` is not read."""
    given = read.hf.get("mlp_layer_types")
    kinds = ["dense", *["sparse"] * (num_layers - 1)] if given is None else given
    is_list = isinstance(kinds, list | tuple) and len(kinds) == num_layers
    rule = f"must name dense or sparse for each of {num_layers} layers"
    read.must(is_list and all(one in KINDS for one in kinds), "mlp_layer_types", given, rule)
    moe_layers = tuple(one == "sparse" for one in kinds) if is_list else ()
    is_given = read.hf.get("first_k_dense_replace") is not None
    first = read.whole("first_k_dense_replace", 0, 0)
    rule = "transformers uses mlp_layer_types, which begins differently; leave it out"
    begins = not is_given or tuple(i >= first for i in range(num_layers)) == moe_layers
    read.must(begins, "first_k_dense_replace", first, rule)
    return {**checked_mixture(read, num_layers), "moe_layers": moe_layers}


SPEC = replace(
    DEEPSEEK,
    family="glm4_moe_lite",
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        attention=latents,
        more=scales,
        windows="none",
        has_shared_experts=True,
        mixture=mixture,
    ),
    classes=("Glm4MoeLiteForCausalLM", "Glm4MoeLiteForSequenceClassification"),
    variants={**DEEPSEEK.variants, "dense in the middle": IN_THE_MIDDLE},
    public={
        "zai-org/GLM-4.7-Flash": sizes(
            2048, 10240, 47, 20, 20, 154880, max_position=202752, num_nextn_predict_layers=1
        )
    },
)
