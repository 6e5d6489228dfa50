"""Qwen3.5 with mixtures, text: Qwen3.5 with a mixture and a shared expert in every layer."""

from __future__ import annotations

from typing import Any

from pentad.models.config_reader import ConfigReader, ConfigValues, read_linear
from pentad.models.families.qwen2_moe import mixture
from pentad.models.families.qwen3_5_text import PROJECTIONS
from pentad.models.families.qwen3_next import DEFAULTS, MIXTURE, SHARED
from pentad.models.spec import DELTA_PLAN, GATED_DECODER, ModelSpec, around_zero, delta_net

EVERYWHERE = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}


def everywhere(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    """transformers ignores keys that would leave mixtures out."""
    own = ConfigValues({**read.hf, **EVERYWHERE}, read.left_out)
    own.problems = read.problems
    return mixture(own, num_layers)


SPEC = ModelSpec(
    family="qwen3_5_moe_text",
    rules=(*around_zero(GATED_DECODER), *delta_net(PROJECTIONS), *SHARED),
    plan=DELTA_PLAN,
    read_dims=ConfigReader(
        # No layer has a dense ffn, and no config its width.
        defaults=DEFAULTS
        | MIXTURE
        | {"num_experts": 256, "num_experts_per_tok": 8}
        | {"intermediate_size": 512},
        mlp_bias=False,
        qk_norm=True,
        norm_offset=1.0,
        partial_rotary=True,
        windows="none",
        has_shared_experts=True,
        mixture=everywhere,
        attn_gate=True,
        linear=read_linear,
    ),
    classes=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForSequenceClassification"),
    # Layers that predict further tokens are not trained, so a saved folder has none.
    ignored=("mtp.*",),
)
