"""Qwen3, dense: grouped-query attention with q and k norms, explicit head_dim, gated mlp."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import ModelSpec, sizes

SPEC = ModelSpec(
    family="qwen3",
    read_dims=ConfigReader(
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
        mlp_bias=False,
        qk_norm=True,
    ),
    classes=("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    public={
        "Qwen/Qwen3-0.6B": sizes(1024, 3072, 28, 16, 8, 151936, tied=True),
        "Qwen/Qwen3-1.7B": sizes(2048, 6144, 28, 16, 8, 151936, tied=True),
        "Qwen/Qwen3-4B": sizes(2560, 9728, 36, 32, 8, 151936, tied=True),
        "Qwen/Qwen3-8B": sizes(4096, 12288, 36, 32, 8, 151936),
        "Qwen/Qwen3-14B": sizes(5120, 17408, 40, 40, 8, 151936),
        "Qwen/Qwen3-32B": sizes(5120, 25600, 64, 64, 8, 151936),
    },
)
