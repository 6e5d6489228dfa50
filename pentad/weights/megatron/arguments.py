"""The arguments a Megatron checkpoint carries: written from a model's dimensions, and checked.

Megatron takes its own from them (`--use-checkpoint-args`), so they are written under the names of
Megatron-LM's command line: one table of those that say what the model computes, which the arguments
of a checkpoint are compared with, and those of its layout and files.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.weights.megatron.layout import MegatronLayout

Args = Mapping[str, Any]

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
"""What none of our families does otherwise."""
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192.0,
}
"""What Megatron's RotaryEmbedding takes for llama3; the factor alone is an argument."""


def model_args(dims: ModelDims) -> dict[str, Any]:
    """The table for a model. It has a meaning only where `unsayable` finds nothing."""
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
    if given is not None and factor > 1:  # what gives it back in `_concentration`
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
    """Megatron counts the tokens before the present one, ours counts it too."""
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
    """What a config.json says and no argument of Megatron does."""
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
        "gated delta nets": bool(dims.linear_layers),
        "a gate on attention's result": dims.attn_gate,
        "norms after attention and ffn": dims.post_norms or not dims.pre_norms,
        "norms of queries and keys over all heads": dims.wide_qk_norm,
        "rotary settings of their own for layers with a window": bool(dims.sliding_rope),
        "attention sinks": dims.attn_sinks,
        "biases of experts, or a limited activation": dims.moe_bias or dims.activation == "clamped",
        "scaled embeddings or queries": (dims.embed_scale, dims.query_scale) != (1.0, 1.0),
        "norms with weights around 0, or gelu": bool(dims.norm_offset)
        or dims.activation == "gelu_tanh",
        "rotary over neighbouring numbers": dims.rotary_pairs == "neighbours",
        "a choice among some groups of experts": dims.router_groups > dims.router_groups_per_token,
    }
    for what, is_there in others.items():
        if is_there:
            yield Problem(where, f"it has {what}, which Megatron's layers have not", "use archon")


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
        rule = "Megatron makes it 1 where nothing is stretched"
        yield Problem(f"{where}, attention_factor = {factor}", rule)


def _unsayable_biases(dims: ModelDims) -> Iterable[Problem]:
    """Megatron puts biases on q, k, v alone, or on every linear layer, experts included."""
    biases = {"q, k, v": dims.qkv_bias, "o": dims.out_bias, "mlp": dims.mlp_bias}
    having = [name for name, has in biases.items() if has]
    everywhere = all(biases.values()) and not any(dims.moe_layers)
    if having and having != ["q, k, v"] and not everywhere:
        rule = "Megatron has them on q, k, v alone or on every linear layer, experts included"
        yield Problem(f"config.json: biases on {' and '.join(having)}", rule)


WITH = {
    "num_query_groups": "group_query_attention",
    "add_qkv_bias": "add_bias_linear",
    "window_size": "window_attn_skip_freq",
    "yarn_mscale": "yarn_mscale_all_dim",
    "moe_router_num_groups": "moe_router_group_topk",
}
"""Arguments that mean something only together with another."""
NOT_ALONE = {"group_query_attention", "window_attn_skip_freq", "yarn_mscale_all_dim"}
NONE_IS_A_VALUE = {
    "num_experts",
    "window_size",
    "rotary_seq_len_interpolation_factor",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk_scaling_factor",
    "yarn_mscale",
}
"""Elsewhere None leaves the choice to Megatron, or to its command line."""


def differences(args: Args, dims: ModelDims) -> list[str]:
    """Which arguments of a checkpoint make another model of it than config.json does."""
    wanted, out = model_args(dims), []
    for name in wanted.keys() & args.keys() - NOT_ALONE:
        is_open = args[name] is None and name not in NONE_IS_A_VALUE
        if is_open or not _matters(name, args, wanted):
            continue
        if not _same(_meaning(name, args, dims), _meaning(name, wanted, dims)):
            rule = f"args.{name} = {_shown(name, args)}, but config.json makes it "
            out.append(rule + _shown(name, wanted))
    return sorted(out)


def _shown(name: str, args: Args) -> str:
    other = WITH.get(name)
    return f"{args[name]}" + (f" with {other} = {args.get(other)}" if other else "")


def _matters(name: str, args: Args, wanted: Args) -> bool:
    if name == "moe_router_pre_softmax":
        return bool(wanted["num_experts"]) and wanted["moe_router_score_function"] == "softmax"
    if name.startswith("moe_"):
        return bool(wanted["num_experts"])
    if name.startswith("yarn_"):
        return args.get("position_embedding_type") == "yarn"
    if name == "rope_scaling_factor":
        return bool(args.get("use_rope_scaling") and wanted["use_rope_scaling"])
    if name == "ffn_hidden_size":
        return not wanted["num_experts"] or wanted["moe_layer_freq"] != 1
    return True


def _meaning(name: str, args: Args, dims: ModelDims) -> Any:
    try:
        return MEANINGS[name](args, dims.num_layers) if name in MEANINGS else args[name]
    except (TypeError, ValueError, ArithmeticError, LookupError):  # of a kind it never has
        return args[name]


def _groups(args: Args, num_layers: int) -> Any:
    groups = args["num_query_groups"]
    return groups if args.get("group_query_attention", groups != 1) else "as many as heads"


def _layer_windows(args: Args, num_layers: int) -> Any:
    """Per layer the tokens before the present one that it sees; -1: all."""
    size, pattern = args["window_size"], args.get("window_attn_skip_freq")
    left = size[0] if size else -1
    if isinstance(pattern, int):  # so many windows, then one layer without
        pattern = [(layer + 1) % pattern for layer in range(num_layers)]
    return [left if slides else -1 for slides in pattern or [1] * num_layers]


def _moe_pattern(args: Args, num_layers: int) -> Any:
    stride = args["moe_layer_freq"]
    if isinstance(stride, int):
        return [int(layer % stride == 0) for layer in range(num_layers)]
    return stride


def _concentration(args: Args, num_layers: int) -> float:
    """What yarn multiplies cos and sin by."""
    weights = [args["yarn_mscale"], args.get("yarn_mscale_all_dim")]
    factor = float(args.get("yarn_rotary_scaling_factor") or 1)
    mine, whole = (1.0, 0.0) if None in weights else weights
    stretch = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (mine * stretch + 1) / (whole * stretch + 1)


def _unturned_layers(args: Args, num_layers: int) -> Any:
    pattern = args["no_rope_freq"] or [0] * num_layers
    if isinstance(pattern, int):  # every so many layers one without rotary
        return [int((layer + 1) % pattern == 0) for layer in range(num_layers)]
    return list(pattern)


def _router_groups(args: Args, num_layers: int) -> Any:
    groups, chosen = args["moe_router_num_groups"], args.get("moe_router_group_topk")
    return None if groups == chosen else (groups, chosen)


MEANINGS: dict[str, Callable[[Args, int], Any]] = {
    "num_query_groups": _groups,
    "add_qkv_bias": lambda args, _: bool(args["add_qkv_bias"] or args.get("add_bias_linear")),
    "window_size": _layer_windows,
    "no_rope_freq": _unturned_layers,
    "moe_layer_freq": _moe_pattern,
    "moe_router_num_groups": _router_groups,
    "moe_router_topk_scaling_factor": lambda args, _: args["moe_router_topk_scaling_factor"] or 1.0,
    "yarn_mscale": _concentration,
}
"""Where equal models may have unequal values."""


def _same(said: Any, wanted: Any) -> bool:
    if isinstance(said, int | float) and isinstance(wanted, int | float):
        return math.isclose(said, wanted, rel_tol=1e-6)  # far below what any argument is given to
    return bool(said == wanted)


FROM_COMMAND_LINE = {
    "norm_epsilon": 1e-5,
    "qk_layernorm": False,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_seq_len_interpolation_factor": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "no_rope_freq": None,
    "moe_shared_expert_gate": False,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
}
"""Arguments that a checkpoint carries and that `--use-checkpoint-args` does not take, at least in
some versions, with the values that Megatron then has."""


def command_line(dims: ModelDims) -> str:
    """What Megatron has to be started with besides `--use-checkpoint-args`."""
    args = model_args(dims)
    flags = {name: args[name] for name, own in FROM_COMMAND_LINE.items() if args[name] != own}
    text = " ".join(_flag(name, value) for name, value in flags.items())
    fields = [f"{name}={value}" for name, value in args.items() if name.startswith("yarn_")]
    return text + (f", and in its TransformerConfig {' '.join(fields)}" if fields else "")


def _flag(name: str, value: Any) -> str:
    option = "--" + name.replace("_", "-")
    return option if value is True else f"{option} {str(value).strip('()').replace(' ', '')}"


CHECKPOINT_VERSION = 3.0
FORMATS = {"legacy": "torch", "torch_dist": "torch_dist"}
AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


def build_args(
    dims: ModelDims,
    layout: MegatronLayout,
    *,
    vocab_rows: int,
    vocab_divisor: int,
    file_format: str,
    spelling: str,
    dtype: torch.dtype,
) -> Namespace:
    """The arguments of a model with these dimensions on that layout."""
    problems = unsayable(dims)
    raise_problems(problems)
    table = model_args(dims)
    return Namespace(
        **table,
        use_rotary_position_embeddings=table["position_embedding_type"] == "rope",  # makes it so
        add_position_embedding=False,
        seq_length=dims.max_position,
        max_position_embeddings=dims.max_position,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        apply_query_key_layer_scaling=False,
        moe_router_dtype="fp32" if dims.router_bias else None,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        tokenizer_type="HuggingFaceTokenizer",
        world_size=layout.tp * layout.pp,
        data_parallel_size=1,
        **{AXES[axis]: size for axis, size in layout.sizes.items()},
        vocab_size=dims.vocab_size,
        padded_vocab_size=vocab_rows,
        make_vocab_size_divisible_by=vocab_divisor,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        ckpt_format=FORMATS[file_format],
        use_dist_ckpt=file_format == "torch_dist",
        transformer_impl="transformer_engine" if spelling == "te" else "local",
        moe_grouped_gemm=bool(dims.num_experts) and spelling == "te",
        no_save_optim=True,
        no_save_rng=True,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


def read_args(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments of a checkpoint; empty where it carries none."""
    args = content.get("args")
    version = content.get("checkpoint_version", CHECKPOINT_VERSION)
    if not isinstance(version, int | float) or version < CHECKPOINT_VERSION:
        rule = f"checkpoint_version = {version}, and before {CHECKPOINT_VERSION} qkv was laid out "
        raise UserError(Problem(where, rule + "otherwise", "save it again with a newer Megatron"))
    if not isinstance(args, Namespace):
        return {}
    known = dict(vars(args))
    if "layernorm_epsilon" in known:  # its name in the code, and once in the arguments
        known.setdefault("norm_epsilon", known["layernorm_epsilon"])
    return known


def check_args(args: Mapping[str, Any], dims: ModelDims, where: str) -> None:
    """The checkpoint's model must be the one its config.json describes."""
    found = differences(args, dims)
    problems = unsayable(dims) if args else []
    if found:
        remedy = "give the config.json that belongs to it; what is meant to differ can be changed "
        problems.append(Problem(where, "; ".join(found), remedy + "in the HF folder made from it"))
    raise_problems(problems)


def claimed_axes(args: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the parallel axes that the arguments name; etp is tp unless given."""
    named = {axis: args[name] for axis, name in AXES.items() if args.get(name) is not None}
    claimed = {axis: int(size) for axis, size in named.items()}
    if "tp" in claimed:
        claimed.setdefault("etp", claimed["tp"])
    return claimed
