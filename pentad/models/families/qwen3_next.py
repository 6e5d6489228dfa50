"""Qwen3-Next: three of four layers are gated delta nets, the others have gated attention; mixtures
with a shared expert, norms with weights around 0, rotary over part of a head."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader, read_linear
from pentad.models.families.qwen2_moe import mixture
from pentad.models.spec import (
    DELTA_PLAN,
    FFN,
    GATED_DECODER,
    LAYER,
    ModelSpec,
    around_zero,
    delta_net,
    is_moe,
    shared_expert,
    sizes,
)
from pentad.weights.map import GroupRows, Rule

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MIXTURE = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
QKVZ, BA = "LK+LK+LV+LV", "LH+LH"
PLACE = LAYER + "linear_attn."
PROJECTIONS = {
    name: GroupRows(PLACE + "in_proj_qkvz.weight", QKVZ, part, "LK1+LK1+LV1+LV1")
    for part, name in enumerate("qkvz")
} | {
    name: GroupRows(PLACE + "in_proj_ba.weight", BA, part, "LH1") for part, name in enumerate("ba")
}
SHARED = (
    *shared_expert("shared_expert"),
    Rule(FFN + "shared.gate.weight", "1 D", LAYER + "mlp.shared_expert_gate.weight", is_moe),
)

SPEC = ModelSpec(
    family="qwen3_next",
    rules=(*around_zero(GATED_DECODER), *delta_net(PROJECTIONS), *SHARED),
    plan=DELTA_PLAN,
    read_dims=ConfigReader(
        defaults=DEFAULTS | MIXTURE,
        mlp_bias=False,
        qk_norm=True,
        norm_offset=1.0,
        partial_rotary=True,
        windows="none",
        has_shared_experts=True,
        mixture=mixture,
        attn_gate=True,
        linear=read_linear,
    ),
    classes=("Qwen3NextForCausalLM", "Qwen3NextForSequenceClassification"),
    # Layers that predict further tokens are not trained, so a saved folder has none.
    ignored=("mtp.*",),
    public={
        "Qwen/Qwen3-Next-80B-A3B": sizes(
            *(2048, 5120, 48, 16, 2, 151936), rope_theta=1e7, max_position=262144
        ),
    },
)
