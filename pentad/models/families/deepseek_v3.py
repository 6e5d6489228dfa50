"""DeepSeek-V3 (DeepSeek-R1, Moonlight): latent attention, dense layers first, then mixtures as in
GLM-4-MoE, whose experts may be chosen from some groups only."""

from __future__ import annotations

import math
from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.families.glm4_moe import MIXTURE, mixture
from pentad.models.spec import (
    ATTN,
    DECODER,
    DECODER_PLAN,
    LAYER,
    ModelSpec,
    has_bias,
    sizes,
    without,
)
from pentad.weights.map import Rule

DEFAULTS = {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
}


def latents(read: ConfigValues) -> dict[str, Any]:
    """Latent dimensions; without a query latent (null), queries are projected from the stream."""
    heads, turned = read.whole("num_attention_heads"), read.whole("qk_rope_head_dim")
    plain, value = read.whole("qk_nope_head_dim"), read.whole("v_head_dim")
    rule = f"must be num_attention_heads = {heads}: the latent gives each head its keys"
    kv_heads = read.whole("num_key_value_heads", heads)
    read.must(kv_heads == heads, "num_key_value_heads", kv_heads, rule)
    read.must(turned % 2 == 0, "qk_rope_head_dim", turned, "must be even: rotary turns pairs")
    rule = "must be even, as all widths of heads here"
    read.must(plain % 2 == 0, "qk_nope_head_dim", plain, rule)
    rule = f"must be at most qk_nope_head_dim + qk_rope_head_dim = {plain + turned}"
    read.must(value <= plain + turned, "v_head_dim", value, rule)
    given = read.hf.get("head_dim")
    rule = f"must be qk_rope_head_dim = {turned}: transformers rotates as many numbers"
    read.must(given in (None, turned), "head_dim", given, rule)
    queries = read.hf.get("q_lora_rank")
    return {
        "num_kv_heads": heads,
        "head_dim": plain + turned,
        "rotary_dim": turned,
        "kv_latent": read.whole("kv_lora_rank"),
        "q_latent": 0 if queries is None else read.whole("q_lora_rank"),
        "value_dim": value,
        "rotary_pairs": "neighbours" if read.flag("rope_interleave") else "halves",
    }


def scales(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    """Attention scale: with `mscale_all_dim`, any rotary scaling scales attention scores too."""
    scaling = dims.rope_scaling
    weight, factor = scaling.get("mscale_all_dim"), scaling.get("factor")
    if not scaling or not weight or read.problems:
        return {}
    rule = "must be given beside mscale_all_dim"
    read.must(factor is not None, "rope_parameters.factor", factor, rule)
    stretch = math.log(max(float(factor or 1.0), 1.0))
    return {"query_scale": (0.1 * weight * stretch + 1.0) ** 2}


def checked_mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    """Checks keys that only the code of the released weights reads, then reads the mixture."""
    read.fixed({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
    return mixture(read, num_layers)


def has_q_latent(dims: ModelDims, layer: int) -> bool:
    return bool(dims.q_latent)


def has_no_q_latent(dims: ModelDims, layer: int) -> bool:
    return not dims.q_latent


def has_q_latent_bias(dims: ModelDims, layer: int) -> bool:
    return dims.qkv_bias and bool(dims.q_latent)


THEIRS = LAYER + "self_attn."
PLAIN = [f"{ATTN}{name}" for name in ("q.weight", "k.weight", "v.weight")]
PLAIN += [f"{ATTN}{name}" for name in ("q.bias", "k.bias", "v.bias", "q_norm.weight")]
RULES = (
    *without(DECODER, *PLAIN, ATTN + "k_norm.weight", ATTN + "o.weight"),
    Rule(ATTN + "q.weight", "Q D", THEIRS + "q_proj.weight", has_no_q_latent),
    Rule(ATTN + "q_a.weight", "Lq D", THEIRS + "q_a_proj.weight", has_q_latent),
    Rule(ATTN + "q_a.bias", "Lq", THEIRS + "q_a_proj.bias", has_q_latent_bias, "zeros"),
    Rule(ATTN + "q_norm.weight", "Lq", THEIRS + "q_a_layernorm.weight", has_q_latent, "ones"),
    Rule(ATTN + "q_b.weight", "Q Lq", THEIRS + "q_b_proj.weight", has_q_latent),
    Rule(ATTN + "kv_a.weight", "Lr D", THEIRS + "kv_a_proj_with_mqa.weight"),
    Rule(ATTN + "kv_a.bias", "Lr", THEIRS + "kv_a_proj_with_mqa.bias", has_bias, "zeros"),
    Rule(ATTN + "kv_norm.weight", "Lk", THEIRS + "kv_a_layernorm.weight", init="ones"),
    Rule(ATTN + "kv_b.weight", "U Lk", THEIRS + "kv_b_proj.weight"),
    Rule(ATTN + "o.weight", "D O", THEIRS + "o_proj.weight"),
    *MIXTURE,
)

SPEC = ModelSpec(
    family="deepseek_v3",
    rules=RULES,
    plan={**DECODER_PLAN, "U": "tp", "O": "tp"},
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        attention=latents,
        more=scales,
        windows="none",
        has_shared_experts=True,
        mixture=checked_mixture,
    ),
    classes=("DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification"),
    # The layers that predict further tokens are not trained, so a saved folder has none.
    ignored=("model.layers.{n}.*",),
    saved_config={"num_nextn_predict_layers": 0},
    variants={
        "queries of the stream": {"q_lora_rank": None},
        "halves turned": {"rope_interleave": False},
    },
    public={
        name: sizes(
            *(7168, 18432, 61, 128, 128, 129280),
            rope_theta=10000.0,
            max_position=163840,
            rope_scaling={
                "type": "yarn",
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 4096,
            },
        )
        for name in ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1")
    }
    | {
        "moonshotai/Moonlight-16B-A3B": sizes(
            *(2048, 11264, 27, 16, 16, 163840),
            rope_theta=50000.0,
            max_position=8192,
            q_lora_rank=None,
            n_routed_experts=64,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            n_shared_experts=2,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.446,
            num_nextn_predict_layers=0,
        )
    },
)
