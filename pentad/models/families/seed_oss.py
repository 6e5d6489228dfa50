"""Seed-OSS: Qwen2, with an explicit head_dim and a separate key for the bias of o."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import ModelSpec, sizes

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "pad_token_id": 1,
}

SPEC = ModelSpec(
    family="seed_oss",
    read_dims=ConfigReader(defaults=DEFAULTS, out_bias="attention_out_bias", windows="none"),
    classes=("SeedOssForCausalLM", "SeedOssForSequenceClassification"),
    variants={"bias of o": {"attention_bias": False, "attention_out_bias": True}},
    public={
        f"ByteDance-Seed/Seed-OSS-36B-{name}": sizes(
            5120, 27648, 64, 80, 8, 155136, rope_theta=1e7, max_position=524288
        )
        for name in ("Base", "Instruct")
    },
)
