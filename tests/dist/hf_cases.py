"""What the workers of the tests of the backend `fsdp` run: a step of a transformers model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from engine_toys import CONFIG, PolicyLoss, ValueLoss, bring_back, keep_state, make_rows
from parity_cases import bend, gradients_of, state_of
from sections import engine_settings

from pentad.checkpoint.exports import export_model
from pentad.core.errors import RunError
from pentad.core.layout import Layout
from pentad.engine.engine import Engine, build_engine
from pentad.engine.section import OptimizerConfig
from pentad.parallel.cuts import local

SMALL = CONFIG | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": SMALL,
    "untied": SMALL | {"tie_word_embeddings": False},
    "olmo2": SMALL | {"model_type": "olmo2", "tie_word_embeddings": False, "hidden_size": 48},
    "phi3": SMALL
    | {"model_type": "phi3", "hidden_size": 48, "pad_token_id": 0, "tie_word_embeddings": False},
    "gemma3_text": SMALL
    | {"model_type": "gemma3_text", "sliding_window": 5, "query_pre_attn_scalar": 9},
    "starcoder2": SMALL | {"model_type": "starcoder2", "hidden_size": 48, "use_bias": True},
    "gpt_neox": SMALL | {"model_type": "gpt_neox", "hidden_size": 48, "tie_word_embeddings": False},
    "qwen3_moe": SMALL
    | {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "ernie4_5_moe": SMALL
    | {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
    },
}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
CONFIGS |= {
    "mixtral": SMALL | ROUTED | {"model_type": "mixtral"},
    "phimoe": SMALL | ROUTED | {"model_type": "phimoe", "hidden_size": 48},
    "hunyuan_v1_moe": SMALL
    | {
        "model_type": "hunyuan_v1_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "moe_topk": 2,
        "moe_intermediate_size": 40,
    },
    "minimax_m2": SMALL
    | ROUTED
    | {"model_type": "minimax_m2", "num_local_experts": 5, "rope_theta": 10000.0},
    "deepseek_v2": SMALL
    | {
        "model_type": "deepseek_v2",
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "head_dim": 4,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma4_text": SMALL
    | {
        "model_type": "gemma4_text",
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "global_head_dim": 6,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 5,
    },
    "olmo_hybrid": SMALL
    | {
        "model_type": "olmo_hybrid",
        "tie_word_embeddings": False,
        "hidden_size": 48,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "pad_token_id": 0,
    },
    "granitemoehybrid": SMALL
    | ROUTED
    | {
        "model_type": "granitemoehybrid",
        "hidden_size": 48,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 12,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
        "layer_types": ["mamba", "attention", "mamba"],
    },
}
"""Mixtures: gate and up in one matrix, or projections whose outputs are gathered, or latent
attention with shared experts, or experts beside a dense layer, or layers that carry state. Modules
of olmo_hybrid have weights in float32 and in 16 bits."""
LOSSES = {"token": PolicyLoss(0.3), "value": ValueLoss()}
SETTINGS = OptimizerConfig(lr=1e-2, weight_decay=1.0, gradient_clipping=0.5, eps=1e-2)
"""The eps keeps a first step of AdamW from blowing up fp32 noise in small gradients to lr."""


def make(source: str, layout: Layout, loss: str = "token", **settings: Any) -> Engine:
    """From a config by its name, or from a folder."""
    settings.setdefault("backend", "fsdp")
    backend = settings.pop("backend")
    settings.setdefault("optimizer", SETTINGS)
    is_folder = source not in CONFIGS
    engine = build_engine(
        source if is_folder else CONFIGS[source],
        engine_settings(**settings),
        layout=layout,
        init_from_scratch=not is_folder,
        seed=3,
        value_head=loss == "value",
        backend=backend,
    )
    if not is_folder:
        bend(engine)
    return engine


def train_step(
    source: str, layout: Layout, loss: str = "token", is_idle: bool = False, **settings: Any
) -> dict[str, Any]:
    """Everything a step gives, as `parity_cases.train_step`. `is_idle`: all tokens choose the
    same experts."""
    engine = make(source, layout, loss, **settings)
    if is_idle:
        with torch.no_grad():
            for name, tensor in state_of(engine).items():
                if name.endswith("mlp.gate.weight"):
                    local(tensor).zero_()
    rows = make_rows(12)
    scored = engine.forward(rows)
    engine.begin_step()
    seen = [
        engine.accumulate(rows[:7], LOSSES[loss], last=False),
        engine.accumulate(rows[7:], LOSSES[loss]),
    ]
    gradients = gradients_of(engine)
    result = engine.end_step()
    return {
        "scored": scored,
        "outputs": [out for one in seen for out in one.outputs],
        "loss_sum": sum(one.loss_sum for one in seen),
        "stats": [one.stats for one in seen],
        "gradients": gradients,
        "result": result,
        "published": {name: x.clone() for name, x in engine.iter_weights()},
    }


def save_and_load(source: str, layout: Layout, folder: str) -> dict[str, Any]:
    """A step, an export, and the state put back; what the folder must hold."""
    engine = make(source, layout)
    rows = make_rows(6)
    before = keep_state(engine)
    engine.save_tag("ref")
    engine.begin_step()
    engine.accumulate(rows, LOSSES["token"])
    engine.end_step()
    moved = engine.forward(rows)
    kept = engine.forward(rows, "ref")
    export_model(engine, folder)
    again = make(folder, layout)
    bring_back(engine, before)
    return {
        "moved": moved,
        "kept": kept,
        "restored": engine.forward(rows),
        "again": again.forward(rows),
        "before": make(source, layout).forward(rows),
    }


def wide_weights(layout: Layout) -> dict[str, Any]:
    """A step in 16 bits and back: the dtypes of routers in a pass and published, and the published
    weights before and after."""
    engine = make("ernie4_5_moe", layout, dtype="bfloat16", param_dtype="bfloat16")
    in_pass = []
    for name, module in engine.decoder.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(lambda gate, _: in_pass.append(gate.weight.dtype))
    kept = keep_state(engine)
    before = {name: x.clone() for name, x in engine.iter_weights()}
    engine.begin_step()
    engine.accumulate(make_rows(6), LOSSES["token"])
    engine.end_step()
    moved = {name: x.clone() for name, x in engine.iter_weights()}
    bring_back(engine, kept)
    return {
        "in_pass": set(in_pass),
        "wide": {name for name, x in moved.items() if x.dtype == torch.float32},
        "moved": {name for name, x in moved.items() if not torch.equal(x, before[name])},
        "before": before,
        "after": {name: x.clone() for name, x in engine.iter_weights()},
    }


def missing_plan_line(layout: Layout) -> str:
    """A plan that does not say of q_norm that each rank sees some of the heads only."""
    engine = make("qwen3", layout)
    engine.held.cuts = {
        name: replace(cut, sees_all=cut.copies.size > 1) for name, cut in engine.cuts.items()
    }
    engine.begin_step()
    try:
        engine.accumulate(make_rows(4), LOSSES["token"])
    except RunError as error:
        return str(error)
    return ""
