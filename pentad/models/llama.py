"""Llama and its kin (SmolLM2): grouped-query attention, gated mlp, optional biases."""

from __future__ import annotations

from pentad.core.dims import ModelDims
from pentad.models.spec import ModelSpec
from pentad.weights.map import Glu, Rule


def has_bias(dims: ModelDims, layer: int) -> bool:
    return dims.qkv_bias


def has_mlp_bias(dims: ModelDims, layer: int) -> bool:
    return dims.mlp_bias


LAYER = "model.layers.{i}."

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
    Rule("layers.{i}.attn.o.bias", "D", LAYER + "self_attn.o_proj.bias", has_bias, "zeros"),
    Rule("layers.{i}.ffn_norm.weight", "D", LAYER + "post_attention_layernorm.weight", init="ones"),
    Rule(
        "layers.{i}.ffn.gate_up.weight",
        "2 F D",
        Glu(LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight"),
    ),
    Rule("layers.{i}.ffn.down.weight", "D F", LAYER + "mlp.down_proj.weight"),
    Rule(
        "layers.{i}.ffn.gate_up.bias",
        "2 F",
        Glu(LAYER + "mlp.gate_proj.bias", LAYER + "mlp.up_proj.bias"),
        has_mlp_bias,
        "zeros",
    ),
    Rule("layers.{i}.ffn.down.bias", "D", LAYER + "mlp.down_proj.bias", has_mlp_bias, "zeros"),
    Rule("norm.weight", "D", "model.norm.weight", init="ones"),
    Rule("head.weight", "V D", "lm_head.weight", tied="embed.weight"),
    Rule("value_head.weight", "1 D", "score.weight", optional=True),
)

SPEC = ModelSpec(
    family="llama",
    rules=RULES,
    plan={"V": "tp", "Q": "tp", "K": "tp", "F": "tp"},
    classes=("LlamaForCausalLM", "LlamaForSequenceClassification"),
    ignored=(LAYER + "self_attn.rotary_emb.inv_freq",),
)
