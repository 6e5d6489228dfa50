"""Translates dimensions, settings and layout to Megatron's TransformerConfig."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.core.layout import Layout
from pentad.engine.megatron.core import (
    TransformerConfig,
    uses_transformer_engine,
    virtual_stages,
)
from pentad.engine.section import EngineSettings
from pentad.parallel.pipeline import Pipeline
from pentad.weights.megatron.model_args import model_args

RECOMPUTED: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
"""`archon.ac_mode` -> fields of TransformerConfig. selective recomputes the attention core."""


def transformer_config(
    dims: ModelDims,
    settings: EngineSettings,
    layout: Layout,
    pipeline: Pipeline | None,
    device: str,
) -> TransformerConfig:
    """Builds the TransformerConfig of a model and its layout. Attention is Pentad's, dropout is 0,
    and options for fused kernels are off, but for those of experts in Transformer Engine."""
    args, model = model_args(dims), settings.model
    has_te = uses_transformer_engine(settings.transformer_impl, device)
    dtype = DTYPES[model.dtype]
    mode = model.archon.ac_mode if model.gradient_checkpointing else "none"
    config = TransformerConfig(
        num_layers=dims.num_layers,
        hidden_size=dims.hidden_size,
        ffn_hidden_size=dims.intermediate_size,
        num_attention_heads=dims.num_heads,
        num_query_groups=dims.num_kv_heads,
        kv_channels=dims.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=dims.norm_eps,
        add_bias_linear=args["add_bias_linear"],
        add_qkv_bias=args["add_qkv_bias"],
        qk_layernorm=args["qk_layernorm"],
        transformer_impl="transformer_engine" if has_te else "local",
        no_rope_freq=args["no_rope_freq"],
        gated_linear_unit=True,
        activation_func=F.silu,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        context_parallel_size=layout.cp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device == "cpu",
        perform_initialization=False,
        deterministic_mode=False,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        moe_token_dispatcher_type="alltoall",  # pipelines require it also without experts
        **RECOMPUTED[mode],
        **(_stages(pipeline) if pipeline is not None else {}),
        **(_mixture(dims, args, layout, has_te=has_te) if dims.num_experts else {}),
    )
    for name, value in args.items():
        if name.startswith("yarn_"):  # read by its attention, but not declared
            setattr(config, name, value)
    return config


def _stages(pipeline: Pipeline) -> dict[str, Any]:
    """Returns the layers of each stage in pipeline order. Sends of an interleaved schedule overlap
    computation; otherwise two ranks would mix up their sends in both directions."""
    stages = [["decoder"] * len(layers) for layers in pipeline.layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    is_interleaved = pipeline.stages_per_rank > 1
    return {
        "pipeline_model_parallel_size": pipeline.pp,
        "virtual_pipeline_model_parallel_size": virtual_stages(pipeline),
        "pipeline_model_parallel_layout": stages,
        "variable_seq_lengths": True,
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
    }


def _mixture(
    dims: ModelDims, args: dict[str, Any], layout: Layout, *, has_te: bool
) -> dict[str, Any]:
    names = (
        *("moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
        *("moe_shared_expert_gate", "moe_router_topk", "moe_router_score_function"),
        *("moe_router_pre_softmax", "moe_router_enable_expert_bias"),
        "moe_router_topk_scaling_factor",
    )
    return {
        **{name: args[name] for name in names},
        "num_moe_experts": dims.num_experts,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32" if dims.router_bias else None,
        "moe_router_bias_update_rate": 0.0,  # Megatron would also apply it in skipped steps
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": has_te,
        "moe_permute_fusion": has_te,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
