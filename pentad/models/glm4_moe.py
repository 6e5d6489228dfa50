"""GLM-4-MoE (GLM-4.5, GLM-4.5-Air): rotary over part of a head, optional q/k norms, dense layers
first, then mixtures routed by sigmoid with a selection bias, beside an expert for every token."""

from __future__ import annotations

from pentad.core.dims import ModelDims
from pentad.models.spec import ModelSpec
from pentad.weights.map import Glu, Rule, Stack


def has_bias(dims: ModelDims, layer: int) -> bool:
    return dims.qkv_bias


def has_qk_norm(dims: ModelDims, layer: int) -> bool:
    return dims.qk_norm


def is_moe(dims: ModelDims, layer: int) -> bool:
    return dims.is_moe(layer)


def is_dense(dims: ModelDims, layer: int) -> bool:
    return not dims.is_moe(layer)


LAYER = "model.layers.{i}."
EXPERT = LAYER + "mlp.experts.{e}."
SHARED = LAYER + "mlp.shared_experts."

RULES = (
    Rule("embed.weight", "V D", "model.embed_tokens.weight"),
    Rule("layers.{i}.attn_norm.weight", "D", LAYER + "input_layernorm.weight", init="ones"),
    Rule("layers.{i}.attn.q.weight", "Q D", LAYER + "self_attn.q_proj.weight"),
    Rule("layers.{i}.attn.k.weight", "K D", LAYER + "self_attn.k_proj.weight"),
    Rule("layers.{i}.attn.v.weight", "K D", LAYER + "self_attn.v_proj.weight"),
    Rule("layers.{i}.attn.o.weight", "D Q", LAYER + "self_attn.o_proj.weight"),
    Rule("layers.{i}.attn.q.bias", "Q", LAYER + "self_attn.q_proj.bias", has_bias, "zeros"),
    Rule("layers.{i}.attn.k.bias", "K", LAYER + "self_attn.k_proj.bias", has_bias, "zeros"),
    Rule("layers.{i}.attn.v.bias", "K", LAYER + "self_attn.v_proj.bias", has_bias, "zeros"),
    Rule(
        "layers.{i}.attn.q_norm.weight", "d", LAYER + "self_attn.q_norm.weight", has_qk_norm, "ones"
    ),
    Rule(
        "layers.{i}.attn.k_norm.weight", "d", LAYER + "self_attn.k_norm.weight", has_qk_norm, "ones"
    ),
    Rule("layers.{i}.ffn_norm.weight", "D", LAYER + "post_attention_layernorm.weight", init="ones"),
    Rule(
        "layers.{i}.ffn.gate_up.weight",
        "2 F D",
        Glu(LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"),
        is_dense,
    ),
    Rule("layers.{i}.ffn.down.weight", "D F", LAYER + "mlp.down_proj.weight", is_dense),
    Rule("layers.{i}.ffn.router.weight", "R D", LAYER + "mlp.gate.weight", is_moe),
    Rule(
        "layers.{i}.ffn.router.bias",
        "R",
        LAYER + "mlp.gate.e_score_correction_bias",
        is_moe,
        "zeros",
        dtype="float32",
    ),
    Rule(
        "layers.{i}.ffn.experts.gate_up",
        "E 2 M D",
        Stack(Glu(EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight")),
        is_moe,
    ),
    Rule("layers.{i}.ffn.experts.down", "E D M", Stack(EXPERT + "down_proj.weight"), is_moe),
    Rule(
        "layers.{i}.ffn.shared.gate_up.weight",
        "2 S D",
        Glu(SHARED + "gate_proj.weight", SHARED + "up_proj.weight"),
        is_moe,
    ),
    Rule("layers.{i}.ffn.shared.down.weight", "D S", SHARED + "down_proj.weight", is_moe),
    Rule("norm.weight", "D", "model.norm.weight", init="ones"),
    Rule("head.weight", "V D", "lm_head.weight", tied="embed.weight"),
    Rule("value_head.weight", "1 D", "score.weight", optional=True),
)

SPEC = ModelSpec(
    family="glm4_moe",
    rules=RULES,
    plan={"V": "tp", "Q": "tp", "K": "tp", "F": "tp", "E": "ep", "M": "etp"},
    # transformers has no scalar model of it; the second is how it would be called.
    classes=("Glm4MoeForCausalLM", "Glm4MoeForSequenceClassification"),
    # The layers that predict further tokens are not trained, so a saved folder has none.
    ignored=("model.layers.{n}.*",),
    saved_config={"num_nextn_predict_layers": 0},
)
