"""The arguments a Megatron checkpoint carries: written from a model's dimensions, and checked.

Megatron takes its own from them (`--use-checkpoint-args`), so they are written under the names of
Megatron-LM's command line: those that say what the model computes (`model_args`), and those of its
layout and files.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.weights.megatron.layout import MegatronLayout
from pentad.weights.megatron.model_args import differences, model_args, unsayable

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
    if problems:
        raise UserError(problems)
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
    if problems:
        raise UserError(problems)


def claimed_axes(args: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the parallel axes that the arguments name; etp is tp unless told."""
    named = {axis: args[name] for axis, name in AXES.items() if args.get(name) is not None}
    claimed = {axis: int(size) for axis, size in named.items()}
    if "tp" in claimed:
        claimed.setdefault("etp", claimed["tp"])
    return claimed
