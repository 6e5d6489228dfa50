"""ERNIE 4.5 with mixtures: layers as in ERNIE 4.5, and in the layers the config names a mixture
routed by softmax with a selection bias, beside shared experts."""

from __future__ import annotations

from typing import Any

from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.spec import (
    DECODER,
    LAYER,
    ModelSpec,
    selection_bias,
    shared_expert,
    sizes,
    wide_routers,
)
from pentad.weights.map import OnlyRow

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
}
BUILT = {"moe_norm_min": 1e-12, "moe_gate_act": "softmax"}


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    read.fixed(BUILT)
    read.same({"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"})
    start, interval = read.whole("moe_layer_start_index", 1, 0), read.whole("moe_layer_interval", 1)
    end = read.whole("moe_layer_end_index", -1, -1)
    end = num_layers - 1 if end == -1 else end
    width = read.whole("moe_intermediate_size")
    return {
        "num_experts": read.whole("moe_num_experts"),
        "num_experts_per_token": read.whole("moe_k"),
        "moe_intermediate_size": width,
        "router_bias": True,
        "shared_expert_size": width * read.whole("moe_num_shared_experts", 2, 0),
        "shared_expert_gate": False,
        "moe_layers": tuple(
            start <= layer <= end and (layer + 1) % interval == 0 for layer in range(num_layers)
        ),
    }


SPEC = ModelSpec(
    family="ernie4_5_moe",
    rules=(
        *wide_routers(DECODER),
        *shared_expert("shared_experts"),
        selection_bias(OnlyRow(LAYER + "mlp.moe_statics.e_score_correction_bias")),
    ),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        rotary_pairs="neighbours",
        windows="none",
        mixture=mixture,
        refused={"use_bias": "a bias of shared experts"},
    ),
    # transformers has no scalar model of it; the second is how it would be called.
    classes=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeForSequenceClassification"),
    # The layers that predict further tokens are not trained, so a saved folder has none.
    ignored=("model.mtp_*",),
    saved_config={"num_nextn_predict_layers": 0},
    variants={
        "mixtures up to a layer": {"moe_layer_end_index": 1, "moe_layer_interval": 1},
        "no shared experts": {"moe_num_shared_experts": 0},
    },
    public={
        "baidu/ERNIE-4.5-21B-A3B-PT": sizes(
            *(2560, 12288, 28, 20, 4, 103424), tied=True, rope_theta=5e5, max_position=131072
        )
    },
)
