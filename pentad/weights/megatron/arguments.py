"""The arguments a Megatron checkpoint carries: written from a model's dimensions, and checked.

Megatron takes its own from them (`--use-checkpoint-args`), so every one that shapes the model is
written, under the names of Megatron-LM's command line.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.weights.megatron.layout import MegatronLayout

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
    _refuse_unsayable(dims)
    return Namespace(
        **_shape_args(dims),
        **_switches(dims, layout),
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


def _refuse_unsayable(dims: ModelDims) -> None:
    """Megatron divides sigmoid scores by their sum if, and only if, a token has several experts."""
    several = dims.num_experts_per_token > 1
    if dims.router_score == "sigmoid" and dims.norm_topk_prob != several:
        where = f"config.json: norm_topk_prob = {str(dims.norm_topk_prob).lower()}"
        rule = f"Megatron makes it {str(several).lower()} for num_experts_per_tok = "
        raise UserError(Problem(where, f"{rule}{dims.num_experts_per_token} scored by sigmoid"))


def _shape_args(dims: ModelDims) -> dict[str, Any]:
    """What `check_args` holds a checkpoint to."""
    return {
        "num_layers": dims.num_layers,
        "hidden_size": dims.hidden_size,
        "ffn_hidden_size": dims.intermediate_size,
        "num_attention_heads": dims.num_heads,
        "num_query_groups": dims.num_kv_heads,
        "kv_channels": dims.head_dim,
        "num_experts": dims.num_experts or None,
        "moe_ffn_hidden_size": dims.moe_intermediate_size or None,
        "moe_shared_expert_intermediate_size": dims.shared_expert_size or None,
        "moe_router_topk": dims.num_experts_per_token or 2,
        "moe_router_score_function": dims.router_score,
        "moe_router_enable_expert_bias": dims.router_bias,
        "moe_router_topk_scaling_factor": dims.router_scale if dims.router_scale != 1 else None,
        "untie_embeddings_and_output_weights": not dims.tie_embeddings,
        "add_qkv_bias": dims.qkv_bias,
        "qk_layernorm": dims.qk_norm,
    }


def _switches(dims: ModelDims, layout: MegatronLayout) -> dict[str, Any]:
    mixed = dims.moe_layers and not all(dims.moe_layers)
    return {
        "group_query_attention": dims.num_kv_heads != dims.num_heads,
        "seq_length": dims.max_position,
        "max_position_embeddings": dims.max_position,
        "position_embedding_type": "rope",
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "rotary_base": dims.rope_theta,
        "rotary_percent": dims.turned_dim / dims.head_dim,
        "rotary_interleaved": False,
        "use_rope_scaling": dims.rope_scaling.get("rope_type") == "llama3",
        "rope_scaling_factor": float(dims.rope_scaling.get("factor", 8.0)),
        "normalization": "RMSNorm",
        "norm_epsilon": dims.norm_eps,
        "apply_layernorm_1p": False,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": dims.out_bias or dims.mlp_bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "apply_query_key_layer_scaling": False,
        "moe_layer_freq": [int(moe) for moe in dims.moe_layers] if mixed else 1,
        "moe_router_pre_softmax": dims.router_score == "softmax" and not dims.norm_topk_prob,
        "moe_router_dtype": "fp32" if dims.router_bias else None,
        "moe_shared_expert_gate": bool(dims.shared_expert_size) and dims.shared_expert_gate,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "tokenizer_type": "HuggingFaceTokenizer",
        "world_size": layout.tp * layout.pp,
        "data_parallel_size": 1,
    }


def read_args(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The arguments of a checkpoint; empty where it carries none."""
    args = content.get("args")
    version = content.get("checkpoint_version", CHECKPOINT_VERSION)
    if not isinstance(version, int | float) or version < CHECKPOINT_VERSION:
        rule = f"checkpoint_version = {version}, and before {CHECKPOINT_VERSION} qkv was laid out "
        raise UserError(Problem(where, rule + "otherwise", "save it again with a newer Megatron"))
    return dict(vars(args)) if isinstance(args, Namespace) else {}


def check_args(args: Mapping[str, Any], dims: ModelDims, where: str) -> None:
    """The checkpoint's model must be the one its config.json describes."""
    problems = []
    for name, wanted in _shape_args(dims).items():
        said = args.get(name)
        is_open = said is None and (name not in args or name != "num_experts")
        if is_open or said == wanted or not _matters(name, dims):
            continue
        rule = f"args.{name} = {said}, but config.json makes it {wanted}"
        problems.append(Problem(where, rule, "give the config.json that belongs to it"))
    if problems:
        raise UserError(problems)


def _matters(name: str, dims: ModelDims) -> bool:
    if name.startswith("moe_"):
        return bool(dims.num_experts)
    if name == "num_query_groups":
        return dims.num_kv_heads != dims.num_heads
    if name == "ffn_hidden_size":
        return any(not dims.is_moe(layer) for layer in range(dims.num_layers))
    return True


def claimed_axes(args: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the parallel axes that the arguments name; etp is tp unless told."""
    named = {axis: args[name] for axis, name in AXES.items() if args.get(name) is not None}
    claimed = {axis: int(size) for axis, size in named.items()}
    if "tp" in claimed:
        claimed.setdefault("etp", claimed["tp"])
    return claimed
