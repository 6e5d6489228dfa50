"""GLM-4 (GLM-4-9B, GLM-Edge): like glm4, without norms after attention and ffn."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.families.glm4 import DEFAULTS
from pentad.models.spec import DECODER, FUSED_GATE_UP, ModelSpec, sizes, with_sources

SPEC = ModelSpec(
    family="glm",
    rules=with_sources(DECODER, FUSED_GATE_UP),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        out_bias=False,
        mlp_bias=False,
        partial_rotary=True,
        rotary_pairs="neighbours",
        windows="none",
    ),
    classes=("GlmForCausalLM", "GlmForSequenceClassification"),
    public={
        "zai-org/glm-4-9b-chat-hf": sizes(
            *(4096, 13696, 40, 32, 2, 151552),
            head_dim=128,
            attention_bias=True,
            rope_theta=10000.0,
            max_position=131072,
        )
    },
)
