"""OLMoE: queries and keys normed over all heads as one vector, and a mixture in every layer."""

from __future__ import annotations

from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.families.mixtral import everywhere
from pentad.models.families.olmo2 import WIDE_NORMS
from pentad.models.spec import DECODER, ModelSpec, sizes, without

DEFAULTS = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 1,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    read.same({"num_local_experts": "num_experts"})
    found = everywhere(read, num_layers, num="num_experts")
    return {**found, "norm_topk_prob": read.flag("norm_topk_prob")}


def checked(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    limit = read.hf.get("clip_qkv")
    read.must(limit is None, "clip_qkv", limit, "limits on q, k and v are not supported")
    rule = f"must be hidden_size / num_attention_heads = {dims.hidden_size / dims.num_heads:g}"
    fits = dims.q_dim == dims.hidden_size
    read.must(fits, "head_dim", dims.head_dim, f"{rule}: the norm of queries has this width")
    return {}


SPEC = ModelSpec(
    family="olmoe",
    rules=(*without(DECODER, *(rule.target for rule in WIDE_NORMS)), *WIDE_NORMS),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        qk_norm=True,
        wide_qk_norm=True,
        windows="none",
        mixture=mixture,
        more=checked,
        refused={"sliding_window": "a window, which transformers has in some attention kernels,"},
    ),
    # transformers has no scalar model of it; the second is how it would be called.
    classes=("OlmoeForCausalLM", "OlmoeForSequenceClassification"),
    public={
        f"allenai/OLMoE-1B-7B-{name}": sizes(
            *(2048, 1024, 16, 16, 16, 50304), rope_theta=10000.0, max_position=4096
        )
        for name in ("0924", "0924-Instruct", "0125", "0125-Instruct")
    },
)
