"""Hunyuan with mixtures (Hunyuan-A13B): attention as in the dense models, and in every layer a
mixture beside a shared expert as wide as the others."""

from __future__ import annotations

from typing import Any

from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.families import hunyuan_v1_dense as dense
from pentad.models.families.mixtral import everywhere
from pentad.models.spec import (
    DECODER,
    FFN,
    LAYER,
    ModelSpec,
    shared_expert,
    sizes,
    wide_routers,
    with_sources,
)

DEFAULTS = {**dense.DEFAULTS, "num_experts": 1, "moe_topk": 1}
BUILT = {
    "use_qk_norm": True,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "moe_layer_num_skipped": 0,
}
"""Keys of released configs, which the code of the released weights reads."""
ROUTER: dict[str, Any] = {FFN + "router.weight": LAYER + "mlp.gate.wg.weight"}


def alike(read: ConfigValues, num_layers: int, *keys: str) -> ConfigValues:
    """The config, with one number in place of a list of equal ones for each layer."""
    changed = {}
    for key in keys:
        given = read.hf.get(key)
        if isinstance(given, list | tuple):
            is_one = len(given) == num_layers and all(one == given[0] for one in given)
            read.must(is_one, key, given, f"must be one number for all of {num_layers} layers")
            changed[key] = given[0] if is_one else 1
    own = ConfigValues({**read.hf, **changed}, read.left_out)
    own.problems = read.problems
    return own


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    read = alike(read, num_layers, "moe_topk", "num_shared_expert", "moe_intermediate_size")
    width = read.whole("intermediate_size")
    read.fixed({**BUILT, "num_shared_expert": 1, "moe_intermediate_size": width})
    read.same({"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"})
    shared = {"shared_expert_size": width, "shared_expert_gate": False}
    return {**everywhere(read, num_layers, "num_experts", "moe_topk"), **shared}


SPEC = ModelSpec(
    family="hunyuan_v1_moe",
    rules=(
        *wide_routers(with_sources(DECODER, {**dense.NORMS, **ROUTER})),
        *shared_expert("shared_mlp"),
    ),
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        qk_norm=True,
        windows="none",
        mixture=mixture,
        more=dense.rotary,
    ),
    classes=("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1ForSequenceClassification"),
    variants={"a stretched base": {"rope_parameters": dense.ALPHA}},
    public={
        f"tencent/Hunyuan-A13B-{kind}": sizes(
            *(4096, 3072, 32, 32, 8, 128167),
            tied=True,
            rope_theta=10000.0,
            head_dim=128,
            num_experts=64,
            moe_topk=8,
        )
        for kind in ("Pretrain", "Instruct")
    },
)
