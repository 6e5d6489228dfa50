"""Mixtral: Mistral with a mixture in every layer, whose experts are separate tensors in files."""

from __future__ import annotations

from typing import Any

from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.spec import DECODER, FFN, LAYER, ModelSpec, sizes, with_sources
from pentad.weights.map import Glu, Stack

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
SPARSE = LAYER + "block_sparse_moe."
EACH = SPARSE + "experts.{e}."
RULES = with_sources(
    DECODER,
    {
        FFN + "router.weight": SPARSE + "gate.weight",
        FFN + "experts.gate_up": Stack(Glu(EACH + "w1.weight", EACH + "w3.weight")),
        FFN + "experts.down": Stack(EACH + "w2.weight"),
    },
)
NOISE = {"router_jitter_noise": "noise on the inputs of mixtures"}


def everywhere(
    read: ConfigValues,
    num_layers: int,
    num: str = "num_local_experts",
    per_token: str = "num_experts_per_tok",
) -> dict[str, Any]:
    """A mixture in every layer, of experts as wide as `intermediate_size`, with weights that sum to
    one; `num` and `per_token`: the keys of the number of experts, and of those of a token."""
    return {
        "num_experts": read.whole(num),
        "num_experts_per_token": read.whole(per_token),
        "moe_intermediate_size": read.whole("intermediate_size"),
        "norm_topk_prob": True,
        "moe_layers": (True,) * num_layers,
    }


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    read.same({"num_experts": "num_local_experts"})
    return everywhere(read, num_layers)


SPEC = ModelSpec(
    family="mixtral",
    rules=RULES,
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        windows="all",
        window_switch=True,
        mixture=mixture,
        refused=NOISE,
    ),
    classes=("MixtralForCausalLM", "MixtralForSequenceClassification"),
    public={
        f"mistralai/Mixtral-{name}-v0.1": sizes(*dims, max_position=max_position)
        for name, max_position, dims in (
            ("8x7B", 32768, (4096, 14336, 32, 32, 8, 32000)),
            ("8x7B-Instruct", 32768, (4096, 14336, 32, 32, 8, 32000)),
            ("8x22B", 65536, (6144, 16384, 56, 48, 8, 32000)),
            ("8x22B-Instruct", 65536, (6144, 16384, 56, 48, 8, 32768)),
        )
    },
)
