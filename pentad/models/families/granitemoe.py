"""Granite 3 with mixtures: Granite with a mixture in every layer, whose experts are stacked in
files."""

from __future__ import annotations

from typing import Any

from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.families import granite
from pentad.models.families.mixtral import SPARSE, everywhere
from pentad.models.spec import DECODER, FFN, ModelSpec, sizes, with_sources
from pentad.weights.map import StackedGlu

DEFAULTS = {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
STACKED: dict[str, Any] = {
    FFN + "router.weight": SPARSE + "router.layer.weight",
    FFN + "experts.gate_up": StackedGlu(SPARSE + "input_linear.weight"),
    FFN + "experts.down": SPARSE + "output_linear.weight",
}


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    return everywhere(read, num_layers)


SPEC = ModelSpec(
    family="granitemoe",
    rules=with_sources(DECODER, STACKED),
    read_dims=ConfigReader(
        defaults=DEFAULTS, mlp_bias=False, windows="none", mixture=mixture, more=granite.factors
    ),
    # transformers has no scalar model of it; the second is how it would be called.
    classes=("GraniteMoeForCausalLM", "GraniteMoeForSequenceClassification"),
    variants=granite.SPEC.variants,
    public={
        f"ibm-granite/granite-3.1-{name}-{kind}": sizes(
            *dims,
            tied=True,
            max_position=131072,
            num_local_experts=num_experts,
            num_experts_per_tok=8,
            embedding_multiplier=12.0,
            attention_multiplier=0.015625,
            residual_multiplier=0.22,
            logits_scaling=6.0,
        )
        for name, num_experts, dims in (
            ("1b-a400m", 32, (1024, 512, 24, 16, 8, 49155)),
            ("3b-a800m", 40, (1536, 512, 32, 24, 8, 49155)),
        )
        for kind in ("base", "instruct")
    },
)
