"""dots.llm1: Qwen3 attention, dense layers first, then mixtures as in GLM-4-MoE."""

from __future__ import annotations

from pentad.models.config_reader import ConfigReader
from pentad.models.families.glm4_moe import MIXTURE, mixture
from pentad.models.spec import DECODER, ModelSpec, sizes

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 2048,
    "sliding_window": 4096,
    "moe_intermediate_size": 1408,
}

SPEC = ModelSpec(
    family="dots1",
    rules=(*DECODER, *MIXTURE),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        qk_norm=True,
        slides_key=("max_window_layers", 62, 0),
        window_switch=True,
        has_shared_experts=True,
        mixture=mixture,
    ),
    # transformers has no scalar model of it; the second is how it would be called.
    classes=("Dots1ForCausalLM", "Dots1ForSequenceClassification"),
    public={
        f"rednote-hilab/dots.llm1.{kind}": sizes(
            *(4096, 10944, 62, 32, 32, 152064),
            rope_theta=1e7,
            n_routed_experts=128,
            num_experts_per_tok=6,
            n_shared_experts=2,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
        for kind in ("base", "inst")
    },
)
