"""Granite 3: Llama, with factors on embeddings, attention scores, both results of a layer and
logits."""

from __future__ import annotations

from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.spec import ModelSpec, sizes


def factors(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    """Scores are multiplied by `attention_multiplier` in place of 1 / sqrt(head_dim)."""
    return {
        "embed_scale": read.number("embedding_multiplier", 1.0),
        "query_scale": read.number("attention_multiplier", 1.0) * dims.head_dim**0.5,
        "residual_scale": read.number("residual_multiplier", 1.0),
        "logit_scale": 1 / read.number("logits_scaling", 1.0),
    }


SPEC = ModelSpec(
    family="granite",
    read_dims=ConfigReader(
        defaults={"max_position_embeddings": 2048}, windows="none", more=factors
    ),
    # transformers has no scalar model of it; the second is how it would be called.
    classes=("GraniteForCausalLM", "GraniteForSequenceClassification"),
    variants={
        "factors": {
            "embedding_multiplier": 7.0,
            "attention_multiplier": 0.11,
            "residual_multiplier": 0.3,
            "logits_scaling": 5.0,
        }
    },
    public={
        f"ibm-granite/granite-3.3-{name}-{kind}": sizes(
            *dims,
            tied=True,
            rope_theta=1e7,
            max_position=131072,
            embedding_multiplier=12.0,
            attention_multiplier=score,
            residual_multiplier=0.22,
            logits_scaling=logits,
        )
        for name, score, logits, dims in (
            ("2b", 0.015625, 8.0, (2048, 8192, 40, 32, 8, 49159)),
            ("8b", 0.0078125, 16.0, (4096, 12800, 40, 32, 8, 49159)),
        )
        for kind in ("base", "instruct")
    },
)
