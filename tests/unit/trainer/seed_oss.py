"""A model file of a family that the package does not have: Seed-OSS is Qwen2 with a head_dim of
its own, and with a key of its own for the bias of o."""

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
    read_dims=ConfigReader(defaults=DEFAULTS, out_bias="attention_out_bias"),
    classes=("SeedOssForCausalLM", "SeedOssForSequenceClassification"),
    variants={"bias of o": {"attention_bias": False, "attention_out_bias": True}},
    public={"ByteDance-Seed/Seed-OSS-36B": sizes(5120, 27648, 64, 80, 8, 155136, rope_theta=1e7)},
)
