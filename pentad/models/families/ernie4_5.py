"""ERNIE 4.5, dense: Llama with one switch for all biases, and rotary over neighbouring pairs."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import ModelSpec, sizes

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
}

SPEC = ModelSpec(
    family="ernie4_5",
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        rotary_pairs="neighbours",
        windows="none",
    ),
    # transformers has no scalar model of it; the second is how it would be called.
    classes=("Ernie4_5ForCausalLM", "Ernie4_5ForSequenceClassification"),
    variants={"biases everywhere": {"use_bias": True}},
    public={
        "baidu/ERNIE-4.5-0.3B-PT": sizes(
            *(1024, 3072, 18, 16, 2, 103424),
            tied=True,
            head_dim=128,
            rope_theta=5e5,
            max_position=131072,
        )
    },
)
