"""GLM-4 (GLM-4-0414), dense: norms before and after attention and ffn, rotary over neighbouring
pairs of half a head, gate and up as one tensor in files."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.spec import (
    ATTN_POST_NORM,
    DECODER,
    FFN_POST_NORM,
    FUSED_GATE_UP,
    LAYER,
    POST_NORMS,
    ModelSpec,
    sizes,
    with_sources,
)

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
NORMS = {
    ATTN_POST_NORM: LAYER + "post_self_attn_layernorm.weight",
    FFN_POST_NORM: LAYER + "post_mlp_layernorm.weight",
}

SPEC = ModelSpec(
    family="glm4",
    rules=with_sources((*DECODER, *POST_NORMS), {**FUSED_GATE_UP, **NORMS}),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        out_bias=False,
        mlp_bias=False,
        post_norms=True,
        partial_rotary=True,
        rotary_pairs="neighbours",
        windows="none",
    ),
    classes=("Glm4ForCausalLM", "Glm4ForSequenceClassification"),
    public={
        name: sizes(
            *dims, head_dim=128, attention_bias=bias, rope_theta=10000.0, max_position=32768
        )
        for name, bias, dims in (
            ("zai-org/GLM-4-9B-0414", True, (4096, 13696, 40, 32, 2, 151552)),
            ("zai-org/GLM-4-32B-0414", False, (6144, 23040, 61, 48, 2, 151552)),
        )
    },
)
