"""Qwen2 and Qwen2.5: grouped-query attention with biases on q, k, v, gated mlp."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import ModelSpec, sizes

SPEC = ModelSpec(
    family="qwen2",
    read_dims=ConfigReader(
        defaults={"num_key_value_heads": 32, "sliding_window": 4096},
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
    ),
    classes=("Qwen2ForCausalLM", "Qwen2ForSequenceClassification"),
    public={
        "Qwen/Qwen2.5-0.5B": sizes(896, 4864, 24, 14, 2, 151936, tied=True),
        "Qwen/Qwen2.5-1.5B": sizes(1536, 8960, 28, 12, 2, 151936, tied=True),
        "Qwen/Qwen2.5-3B": sizes(2048, 11008, 36, 16, 2, 151936, tied=True),
        "Qwen/Qwen2.5-7B": sizes(3584, 18944, 28, 28, 4, 152064),
        "Qwen/Qwen2.5-14B": sizes(5120, 13824, 48, 40, 8, 152064),
        "Qwen/Qwen2.5-32B": sizes(5120, 27648, 64, 40, 8, 152064),
        "Qwen/Qwen2.5-72B": sizes(8192, 29568, 80, 64, 8, 152064),
    },
)
