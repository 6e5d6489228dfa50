"""OLMo 3: OLMo 2 with windows on three of four layers, whose rotary is never stretched."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.families.olmo2 import DEFAULTS, RULES
from pentad.models.spec import ModelSpec, sizes

THETA = 5e5
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32,
    "beta_slow": 1,
}


def slides(layer: int, first: int) -> bool:
    return (layer + 1) % 4 != 0


SPEC = ModelSpec(
    family="olmo3",
    rules=RULES,
    read_dims=ConfigReader(
        defaults={**DEFAULTS, "sliding_window": 4096, "rope_theta": THETA},
        mlp_bias=False,
        qk_norm=True,
        wide_qk_norm=True,
        pre_norms=False,
        post_norms=True,
        sliding_theta=("", THETA),
        slides=slides,
        window_switch=True,
    ),
    classes=("Olmo3ForCausalLM", "Olmo3ForSequenceClassification"),
    public={
        name: sizes(*dims, 100278, rope_theta=THETA, max_position=65536, rope_scaling=YARN)
        for name, dims in {
            "allenai/Olmo-3-1025-7B": (4096, 11008, 32, 32, 32),
            "allenai/Olmo-3-1125-32B": (5120, 27648, 64, 40, 8),
        }.items()
    },
)
