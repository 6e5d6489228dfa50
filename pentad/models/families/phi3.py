"""Phi-3 and Phi-4: Llama, with q, k, v in one tensor of the files, and gate, up in another."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import DECODER, FUSED_GATE_UP, FUSED_QKV, ModelSpec, sizes, with_sources

DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "pad_token_id": 32000}

SPEC = ModelSpec(
    family="phi3",
    rules=with_sources(DECODER, {**FUSED_QKV, **FUSED_GATE_UP}),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        partial_rotary=True,
        ropes=frozenset({"default", "longrope"}),
        windows="all",
        window_switch=True,
    ),
    classes=("Phi3ForCausalLM", "Phi3ForSequenceClassification"),
    public={
        "microsoft/phi-4": sizes(
            5120, 17920, 40, 40, 10, 100352, rope_theta=250000.0, max_position=16384
        ),
        "microsoft/Phi-3-mini-4k-instruct": sizes(
            *(3072, 8192, 32, 32, 32, 32064),
            rope_theta=10000.0,
            max_position=4096,
            sliding_window=2047,
        ),
    },
)
