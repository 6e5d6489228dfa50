"""GLM-4-MoE (GLM-4.5, GLM-4.5-Air): rotary over part of a head, optional q/k norms, dense layers
first, then mixtures routed by sigmoid with a selection bias, and a shared expert."""

from __future__ import annotations

from typing import Any

from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.spec import DECODER, LAYER, ModelSpec, selection_bias, shared_expert, sizes

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
RELEASED: dict[str, Any] = {"head_dim": 128, "attention_bias": True, "max_position": 131072}


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    """As in DeepSeek-V3: sigmoid scores, a selection bias in the files, optionally a choice of
    groups first, scaled weights, shared experts without a gate, and dense first layers."""
    groups, groups_per_token = read.whole("n_group", 1), read.whole("topk_group", 1)
    num_experts, num_chosen = read.whole("n_routed_experts"), read.whole("num_experts_per_tok")
    size, is_choice = num_experts // groups, groups_per_token < groups
    read.same({"num_local_experts": "n_routed_experts"})
    rule = f"must be at most n_group = {groups}"
    read.must(groups_per_token <= groups, "topk_group", groups_per_token, rule)
    rule = f"must divide n_routed_experts = {num_experts} into groups of at least 2"
    fits = not is_choice or (num_experts % groups == 0 and size > 1)
    read.must(fits, "n_group", groups, rule)
    rule = f"must be at most the experts of topk_group = {groups_per_token} groups"
    fits = not is_choice or num_chosen <= groups_per_token * size
    read.must(fits, "num_experts_per_tok", num_chosen, rule)
    width, num_dense = read.expert_width, read.whole("first_k_dense_replace", 0, 0)
    return {
        "num_experts": num_experts,
        "num_experts_per_token": num_chosen,
        "router_groups": groups if is_choice else 1,
        "router_groups_per_token": groups_per_token if is_choice else 1,
        "moe_intermediate_size": width,
        "norm_topk_prob": read.flag("norm_topk_prob"),
        "router_score": "sigmoid",
        "router_scale": read.number("routed_scaling_factor", 1.0),
        "router_bias": True,
        "shared_expert_size": width * read.whole("n_shared_experts"),
        "shared_expert_gate": False,
        "moe_layers": tuple(layer >= num_dense for layer in range(num_layers)),
        "num_mtp_layers": read.whole("num_nextn_predict_layers", 0, 0),
    }


MIXTURE = (
    *shared_expert("shared_experts"),
    selection_bias(LAYER + "mlp.gate.e_score_correction_bias"),
)

SPEC = ModelSpec(
    family="glm4_moe",
    rules=(*DECODER, *MIXTURE),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        out_bias=False,
        mlp_bias=False,
        qk_norm="use_qk_norm",
        partial_rotary=True,
        windows="none",
        has_shared_experts=True,
        mixture=mixture,
    ),
    # transformers has no scalar model of it; the second is how it would be called.
    classes=("Glm4MoeForCausalLM", "Glm4MoeForSequenceClassification"),
    # The layers that predict further tokens are not trained, so a saved folder has none.
    ignored=("model.layers.{n}.*",),
    saved_config={"num_nextn_predict_layers": 0},
    public={
        "zai-org/GLM-4.5-Air": sizes(4096, 10944, 46, 96, 8, 151552, **RELEASED),
        "zai-org/GLM-4.5": sizes(
            *(5120, 12288, 92, 96, 8, 151552),
            n_routed_experts=160,
            moe_intermediate_size=1536,
            first_k_dense_replace=3,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
            **RELEASED,
        ),
    },
)
