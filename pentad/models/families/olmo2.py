"""OLMo 2: norms after attention and ffn instead of before them, queries and keys normed over all
heads as one vector."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import (
    ATTN,
    ATTN_NORM,
    DECODER,
    FFN_NORM,
    LAYER,
    POST_NORMS,
    ModelSpec,
    sizes,
    without,
)
from pentad.weights.map import Rule

DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "pad_token_id": 1}

WIDE_NORMS = tuple(
    Rule(f"{ATTN}{x}_norm.weight", shape, f"{LAYER}self_attn.{x}_norm.weight", init="ones")
    for x, shape in {"q": "Q", "k": "K"}.items()
)
RULES = (
    *without(DECODER, ATTN_NORM, FFN_NORM, *(rule.target for rule in WIDE_NORMS)),
    *POST_NORMS,
    *WIDE_NORMS,
)

SPEC = ModelSpec(
    family="olmo2",
    rules=RULES,
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        qk_norm=True,
        wide_qk_norm=True,
        pre_norms=False,
        post_norms=True,
        windows="none",
    ),
    classes=("Olmo2ForCausalLM", "Olmo2ForSequenceClassification"),
    public={
        name: sizes(*dims, 100352, rope_theta=5e5, max_position=4096)
        for name, dims in {
            "allenai/OLMo-2-0425-1B": (2048, 8192, 16, 16, 16),
            "allenai/OLMo-2-1124-7B": (4096, 11008, 32, 32, 32),
            "allenai/OLMo-2-1124-13B": (5120, 13824, 40, 40, 40),
            "allenai/OLMo-2-0325-32B": (5120, 27648, 64, 40, 8),
        }.items()
    },
)
