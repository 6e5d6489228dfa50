"""Builds and checks the arguments stored in a Megatron checkpoint.

Megatron reads its own arguments from them (`--use-checkpoint-args`), so they have the names of
Megatron-LM's command line. They consist of the table in `model_args`, which is also compared with
the arguments of a checkpoint, and of arguments for layout and files.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.weights.megatron.layout import MegatronLayout
from pentad.weights.megatron.model_args import model_args, unsayable

Args = Mapping[str, Any]

WITH = {
    "num_query_groups": "group_query_attention",
    "add_qkv_bias": "add_bias_linear",
    "window_size": "window_attn_skip_freq",
    "yarn_mscale": "yarn_mscale_all_dim",
    "moe_router_num_groups": "moe_router_group_topk",
}
"""Arguments that have a meaning only with another argument."""
NOT_ALONE = {"group_query_attention", "window_attn_skip_freq", "yarn_mscale_all_dim"}
NONE_IS_A_VALUE = {
    "num_experts",
    "window_size",
    "rotary_seq_len_interpolation_factor",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk_scaling_factor",
    "yarn_mscale",
}
"""Arguments with a meaning of None; for others None means Megatron's default."""


def differences(args: Args, dims: ModelDims) -> list[str]:
    """Lists arguments of a checkpoint that contradict its config.json."""
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
    except (TypeError, ValueError, ArithmeticError, LookupError):  # arguments of unexpected types
        return args[name]


def _groups(args: Args, num_layers: int) -> Any:
    groups = args["num_query_groups"]
    return groups if args.get("group_query_attention", groups != 1) else "as many as heads"


def _layer_windows(args: Args, num_layers: int) -> Any:
    """Attention window per layer: visible tokens before the current one; -1: all."""
    size, pattern = args["window_size"], args.get("window_attn_skip_freq")
    left = size[0] if size else -1
    if isinstance(pattern, int):  # N layers with a window, then one without
        pattern = [(layer + 1) % pattern for layer in range(num_layers)]
    return [left if slides else -1 for slides in pattern or [1] * num_layers]


def _moe_pattern(args: Args, num_layers: int) -> Any:
    stride = args["moe_layer_freq"]
    if isinstance(stride, int):
        return [int(layer % stride == 0) for layer in range(num_layers)]
    return stride


def _concentration(args: Args, num_layers: int) -> float:
    """The factor by which YaRN multiplies cos and sin."""
    weights = [args["yarn_mscale"], args.get("yarn_mscale_all_dim")]
    factor = float(args.get("yarn_rotary_scaling_factor") or 1)
    mine, whole = (1.0, 0.0) if None in weights else weights
    stretch = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (mine * stretch + 1) / (whole * stretch + 1)


def _unturned_layers(args: Args, num_layers: int) -> Any:
    pattern = args["no_rope_freq"] or [0] * num_layers
    if isinstance(pattern, int):  # every N-th layer has no rotary embedding
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
"""Functions for arguments whose values may differ between equal models."""


def _same(said: Any, wanted: Any) -> bool:
    if isinstance(said, int | float) and isinstance(wanted, int | float):
        return math.isclose(said, wanted, rel_tol=1e-6)  # finer than any argument's precision
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
"""Arguments that `--use-checkpoint-args` does not read from a checkpoint, at least in some
versions, with Megatron's defaults."""


def command_line(dims: ModelDims) -> str:
    """The Megatron arguments that are needed besides `--use-checkpoint-args`."""
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
    """Builds the arguments for a model of these dimensions in this layout."""
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
    """The arguments of a checkpoint; empty if it has none."""
    args = content.get("args")
    version = content.get("checkpoint_version", CHECKPOINT_VERSION)
    if not isinstance(version, int | float) or version < CHECKPOINT_VERSION:
        rule = f"checkpoint_version = {version}, and before {CHECKPOINT_VERSION} qkv was laid out "
        raise UserError(Problem(where, rule + "otherwise", "save it again with a newer Megatron"))
    if not isinstance(args, Namespace):
        return {}
    known = dict(vars(args))
    if "layernorm_epsilon" in known:  # the name in the code differs
        known.setdefault("norm_epsilon", known["layernorm_epsilon"])
    return known


def check_args(args: Mapping[str, Any], dims: ModelDims, where: str) -> None:
    """Raises unless the checkpoint's arguments match its config.json."""
    found = differences(args, dims)
    problems = unsayable(dims) if args else []
    if found:
        remedy = "give the config.json that belongs to it; what is meant to differ can be changed "
        problems.append(Problem(where, "; ".join(found), remedy + "in the HF folder made from it"))
    raise_problems(problems)


def claimed_axes(args: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the parallel axes in the arguments; etp is tp unless given."""
    named = {axis: args[name] for axis, name in AXES.items() if args.get(name) is not None}
    claimed = {axis: int(size) for axis, size in named.items()}
    if "tp" in claimed:
        claimed.setdefault("etp", claimed["tp"])
    return claimed
