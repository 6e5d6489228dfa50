"""Translates a model's config to Megatron's arguments, and lists what they cannot express.

Without torch, so that `plan` can check whether Megatron can train a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem

SAME_FOR_ALL: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "squared_relu": False,
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "rotary_interleaved": False,
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "attention_output_gate": False,
    "qk_l2_norm": False,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "moe_router_num_groups": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
}
"""Arguments that are equal for all families."""
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192.0,
}
"""Megatron's fixed settings of llama3 rotary; only the factor is an argument."""


def model_args(dims: ModelDims) -> dict[str, Any]:
    """Megatron's arguments for a model. Valid only if `unsayable` returns nothing."""
    return {
        **SAME_FOR_ALL,
        "num_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "ffn_hidden_size": dims.intermediate_size,
        "num_attention_heads": dims.num_heads,
        "num_query_groups": dims.num_kv_heads,
        "group_query_attention": dims.num_kv_heads != dims.num_heads,
        "kv_channels": dims.head_dim,
        "untie_embeddings_and_output_weights": not dims.tie_embeddings,
        "add_bias_linear": dims.out_bias or dims.mlp_bias,
        "add_qkv_bias": dims.qkv_bias,
        "qk_layernorm": dims.qk_norm,
        "norm_epsilon": dims.norm_eps,
        **_rotary(dims),
        **_windows(dims),
        **_mixture(dims),
    }


def _rotary(dims: ModelDims) -> dict[str, Any]:
    scaling, kind = dims.rope_scaling, _kind(dims)
    return {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": dims.rope_theta,
        "rotary_percent": dims.turned_dim / dims.head_dim,
        "no_rope_freq": [int(one) for one in dims.unturned_layers] or None,
        "rotary_seq_len_interpolation_factor": scaling.get("factor") if kind == "linear" else None,
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": float(scaling["factor"]) if kind == "llama3" else 8.0,
        **(_yarn(dims) if kind == "yarn" else {}),
    }


def _kind(dims: ModelDims) -> str:
    return str(dims.rope_scaling.get("rope_type", "default"))


def _old_length(dims: ModelDims) -> float:
    return float(dims.rope_scaling.get("original_max_position_embeddings") or dims.max_position)


def _yarn(dims: ModelDims) -> dict[str, Any]:
    scaling, old_length = dims.rope_scaling, _old_length(dims)
    factor = float(scaling.get("factor") or dims.max_position / old_length)
    given, weights = scaling.get("attention_factor"), (1.0, 0.0)
    if given is not None and factor > 1:  # the inverse of `_concentration`
        weights = ((given - 1) / (0.1 * math.log(factor)), 0.0)
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        weights = (float(scaling["mscale"]), float(scaling["mscale_all_dim"]))
    return {
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": int(old_length),
        "yarn_beta_fast": float(scaling.get("beta_fast") or 32),
        "yarn_beta_slow": float(scaling.get("beta_slow") or 1),
        "yarn_mscale": weights[0],
        "yarn_mscale_all_dim": weights[1],
        "yarn_correction_range_round_to_int": bool(scaling.get("truncate", True)),
    }


def _windows(dims: ModelDims) -> dict[str, Any]:
    """Window arguments. Megatron excludes the current token, Pentad includes it."""
    windows = [dims.window(layer) for layer in range(dims.num_layers)]
    slides = [int(window is not None) for window in windows]
    width = max((window for window in windows if window is not None), default=None)
    return {
        "window_size": None if width is None else (width - 1, 0),
        "window_attn_skip_freq": slides if any(slides) and not all(slides) else None,
    }


def _mixture(dims: ModelDims) -> dict[str, Any]:
    mixed = dims.moe_layers and not all(dims.moe_layers)
    return {
        "num_experts": dims.num_experts or None,
        "moe_ffn_hidden_size": dims.moe_intermediate_size or None,
        "moe_layer_freq": [int(moe) for moe in dims.moe_layers] if mixed else 1,
        "moe_shared_expert_intermediate_size": dims.shared_expert_size or None,
        "moe_shared_expert_gate": bool(dims.shared_expert_size) and dims.shared_expert_gate,
        "moe_router_topk": dims.num_experts_per_token or 2,
        "moe_router_score_function": dims.router_score,
        "moe_router_pre_softmax": dims.router_score == "softmax" and not dims.norm_topk_prob,
        "moe_router_enable_expert_bias": dims.router_bias,
        "moe_router_topk_scaling_factor": dims.router_scale if dims.router_scale != 1 else None,
    }


def unsayable(dims: ModelDims) -> list[Problem]:
    """Lists features of a config.json that Megatron's arguments cannot express."""
    found = [*_unsayable_layers(dims), *_unsayable_rotary(dims), *_unsayable_biases(dims)]
    several = dims.num_experts_per_token > 1
    if dims.router_score == "sigmoid" and dims.norm_topk_prob != several:
        where = f"config.json: norm_topk_prob = {str(dims.norm_topk_prob).lower()}"
        rule = f"Megatron makes it {str(several).lower()} for num_experts_per_tok = "
        found.append(Problem(where, f"{rule}{dims.num_experts_per_token} scored by sigmoid"))
    return found


def _unsayable_layers(dims: ModelDims) -> Iterable[Problem]:
    where = f"config.json: model_type = {dims.family}"
    if dims.kv_latent:
        yield Problem(where, "its latent attention has no Megatron tensors here", "use archon")
    others = {
        "other towers beside its text": bool(dims.tower_names),
        "gated delta nets": bool(dims.linear_layers),
        "a gate on attention's result": dims.attn_gate,
        "attention sinks": dims.attn_sinks,
        "a limit on logits": bool(dims.logit_cap),
        "a limit on attention scores": bool(dims.score_cap),
        "layers with heads of another width or number": bool(dims.own),
        "biases of experts, or a limited activation": dims.moe_bias or dims.activation == "clamped",
        "norms after attention and ffn": dims.post_norms or not dims.pre_norms,
        "norms of queries and keys over all heads": dims.wide_qk_norm,
        "norms of queries and keys after rotary": dims.norms_turned,
        "separate rotary settings for layers with a window": bool(dims.sliding_rope),
        "scaled embeddings or queries": (dims.embed_scale, dims.query_scale) != (1.0, 1.0),
        "factors of layers' results or of logits": (dims.residual_scale, dims.logit_scale)
        != (1.0, 1.0),
        "queries that grow with the position": bool(dims.query_growth),
        "norms with weights around 0, or gelu": bool(dims.norm_offset)
        or dims.activation == "gelu_tanh",
        "rotary over neighbouring numbers": dims.rotary_pairs == "neighbours",
        "a choice among some groups of experts": dims.router_groups > dims.router_groups_per_token,
    }
    for what, is_there in others.items():
        if is_there:
            yield Problem(where, f"it has {what}, which Megatron's layers do not", "use archon")


def _unsayable_rotary(dims: ModelDims) -> Iterable[Problem]:
    scaling, kind = dims.rope_scaling, _kind(dims)
    where = f"config.json: rope_type = {kind}"
    if kind not in ("default", "linear", "llama3", "yarn"):
        yield Problem(where, "Megatron has linear, llama3 and yarn")
    if kind == "llama3":
        given = {**scaling, "original_max_position_embeddings": _old_length(dims)}
        others = [f"{key} = {given[key]:g}" for key in LLAMA3 if given[key] != LLAMA3[key]]
        fixed = ", ".join(f"{key} = {value:g}" for key, value in LLAMA3.items())
        if others:
            yield Problem(f"{where}, {', '.join(others)}", f"Megatron has only {fixed}")
    if kind == "yarn" and dims.turned_dim != dims.head_dim:
        rule = f"it turns {dims.turned_dim} of {dims.head_dim} numbers, Megatron's yarn all of them"
        yield Problem(where, rule)
    factor = scaling.get("attention_factor")
    if (
        kind == "yarn"
        and factor not in (None, 1)
        and _yarn(dims)["yarn_rotary_scaling_factor"] <= 1
    ):
        rule = "Megatron makes it 1 if nothing is stretched"
        yield Problem(f"{where}, attention_factor = {factor}", rule)


def _unsayable_biases(dims: ModelDims) -> Iterable[Problem]:
    """Lists unsupported biases: Megatron has them on q, k, v only, or on every linear layer."""
    biases = {"q, k, v": dims.qkv_bias, "o": dims.out_bias, "mlp": dims.mlp_bias}
    having = [name for name, has in biases.items() if has]
    everywhere = all(biases.values()) and not any(dims.moe_layers)
    if having and having != ["q, k, v"] and not everywhere:
        rule = "Megatron has them only on q, k, v or on every linear layer, experts included"
        yield Problem(f"config.json: biases on {' and '.join(having)}", rule)
