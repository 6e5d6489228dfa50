"""Gemma 4, text: layers without a window have another width and number of heads, and may use keys
as values; values are normed, logits limited, and each layer has a factor. Some models have mixtures
beside the dense ffn, others per-layer embeddings and layers that share keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import ConfigReader, ConfigValues
from pentad.models.families.gemma3_text import BEFORE_FFN
from pentad.models.spec import (
    DECODER,
    FFN,
    FFN_NORM,
    LAYER,
    POST_NORMS,
    ModelSpec,
    gated,
    has_dense_beside,
    has_layer_inputs,
    has_layer_scale,
    is_moe,
    sizes,
    with_own_keys,
    with_sources,
    without,
)
from pentad.weights.map import Expert, Glu, Rows, Rule, Spec, Stack

ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "sliding_window": 512,
    "rope_parameters": ROPE,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
"""transformers' defaults of missing keys."""
SMALL: dict[str, Any] = {"tied": True, "head_dim": 256, "final_logit_softcapping": 30.0}
SMALL |= {"max_position": 131072}
LARGE = SMALL | {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
LARGE |= {"max_position": 262144, "sliding_window": 1024}
HEADS = ("head_dim", "num_key_value_heads")
"""Keys of `per_layer_config`, in which transformers saves differences between layers."""


def slides(layer: int, _: int) -> bool:
    return (layer + 1) % 6 != 0


def heads_without_window(read: ConfigValues, dims: ModelDims, full: list[int]) -> tuple[int, int]:
    """(width, number of key heads) of layers without a window."""
    given = read.hf.get("per_layer_config")
    if "per_layer_config" not in read.hf:
        key = "num_global_key_value_heads"
        has_own = read.flag("attention_k_eq_v") and read.hf.get(key) is not None
        num = read.whole(key) if has_own else dims.num_kv_heads
        return read.whole("global_head_dim"), num
    if given is None:  # then all layers are alike in transformers
        return dims.head_dim, dims.num_kv_heads
    rule = f"must give {' and '.join(HEADS)} of all layers without a window alike, and nothing else"
    is_map = isinstance(given, Mapping) and all(isinstance(own, Mapping) for own in given.values())
    read.must(is_map, "per_layer_config", given, rule)
    # Saved with zeros before them, so that they sort as text: 05, 11.
    by_layer = {str(key).lstrip("0") or "0": own for key, own in given.items()} if is_map else {}
    own = dict(by_layer[str(full[0])]) if str(full[0]) in by_layer else {}
    alike = {str(layer): own for layer in full} if own else {}
    read.must(by_layer == alike and own.keys() <= {*HEADS}, "per_layer_config", given, rule)
    heads = ConfigValues(
        {"head_dim": dims.head_dim, "num_key_value_heads": dims.num_kv_heads} | own
    )
    found = heads.whole("head_dim"), heads.whole("num_key_value_heads")
    read.problems += heads.problems
    return found


def shared_layers(
    read: ConfigValues, dims: ModelDims, full: list[int]
) -> dict[int, dict[str, Any]]:
    """Differences of the last layers, which read the keys and values of the last earlier layer of
    their kind."""
    num_shared = read.whole("num_kv_shared_layers", 0, 0)
    first = dims.num_layers - num_shared
    sources = {i in full: i for i in range(first)}
    shared = range(max(first, 0), dims.num_layers)
    rule = "each of the last layers needs an earlier one of its kind, whose keys it reads"
    has_sources = all((i in full) in sources for i in shared)
    read.must(has_sources, "num_kv_shared_layers", num_shared, rule)
    width = (1 + read.flag("use_double_wide_mlp")) * dims.intermediate_size
    return {
        i: {"kv_from": sources[i in full], "intermediate_size": width}
        for i in (shared if has_sources else ())
    }


def layer_inputs(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    width = read.whole("hidden_size_per_layer_input", 0, 0)
    if not width:
        return {}
    rows = read.whole("vocab_size_per_layer_input")
    rule = f"must be at least vocab_size = {dims.vocab_size}: other tokens would have no row"
    read.must(rows >= dims.vocab_size, "vocab_size_per_layer_input", rows, rule)
    padding = read.hf.get("pad_token_id")
    is_counted_back = isinstance(padding, int) and padding < 0 and rows != dims.vocab_size
    rule = f"is another row of {rows} than of vocab_size = {dims.vocab_size}; give it without sign"
    read.must(not is_counted_back, "pad_token_id", padding, rule)
    return {"layer_embed_dim": width, "layer_embed_rows": rows}


def differences(read: ConfigValues, dims: ModelDims) -> dict[str, Any]:
    """Dimensions that only layers without a window have, and those of all layers."""
    # In transformers the last layer never has a window.
    sliding = (*dims.sliding_layers[:-1], False) if any(dims.sliding_layers[:-1]) else ()
    full = [i for i in range(dims.num_layers) if not (sliding and sliding[i])]
    width, num_kv_heads = heads_without_window(read, dims, full)
    rule = f"must divide num_attention_heads = {dims.num_heads}"
    fits = dims.num_heads % num_kv_heads == 0
    read.must(fits, "num_global_key_value_heads", num_kv_heads, rule)
    read.must(width % 2 == 0, "global_head_dim", width, "must be even: rotary turns pairs")
    own = {
        "head_dim": width,
        "num_kv_heads": num_kv_heads,
        "query_scale": width**0.5,
        "values_are_keys": read.flag("attention_k_eq_v"),
    }
    sharing = shared_layers(read, dims, full)
    seen = read.hf.get("use_bidirectional_attention")
    rule = "text would attend to later tokens; only null and vision are supported"
    read.must(seen in (None, "vision"), "use_bidirectional_attention", seen, rule)
    turned = {"rope_theta": dims.rope_theta, **dims.rope_scaling}
    return {
        "sliding_layers": sliding,
        "sliding_window": dims.sliding_window if sliding else None,
        "sliding_rope": (dims.sliding_rope or turned) if sliding else {},
        "own": tuple(
            (own if i in full else {}) | sharing.get(i, {}) for i in range(dims.num_layers)
        ),
        **layer_inputs(read, dims),
        "embed_scale": dims.hidden_size**0.5,
        "query_scale": dims.head_dim**0.5,  # scores have no factor
        "logit_cap": read.maybe("final_logit_softcapping"),
        "value_norm": True,
        "wide_norms": True,
        "layer_scale": True,
    }


def mixture(read: ConfigValues, num_layers: int) -> dict[str, Any]:
    if not read.flag("enable_moe_block"):
        return {}
    return {
        "num_experts": read.whole("num_experts"),
        "num_experts_per_token": read.whole("top_k_experts"),
        "moe_intermediate_size": read.whole("moe_intermediate_size"),
        "moe_layers": (True,) * num_layers,
        "has_dense_beside": True,
    }


def dense_only(dims: ModelDims, layer: int) -> bool:
    return not has_dense_beside(dims, layer)


def norm(native: str, hf: str) -> Rule:
    return Rule(f"{FFN}{native}.weight", "D", f"{LAYER}{hf}.weight", has_dense_beside, "ones")


EXPERTS = LAYER + "experts."
MIXTURE = (
    gated(FFN + "dense.", "2 F D", LAYER + "mlp.", ".weight", has_dense_beside, "normal"),
    Rule(FFN + "dense.down.weight", "D F", LAYER + "mlp.down_proj.weight", has_dense_beside),
    norm("dense_norm", "pre_feedforward_layernorm"),
    norm("dense_post_norm", "post_feedforward_layernorm_1"),
    norm("norm", "pre_feedforward_layernorm_2"),
    norm("post_norm", "post_feedforward_layernorm_2"),
    Rule(FFN + "router.in_scale", "D", LAYER + "router.scale", is_moe, "ones"),
    Rule(FFN + "router.expert_scale", "R", LAYER + "router.per_expert_scale", is_moe, "ones"),
)
PARTS = (Rows(EXPERTS + "gate_up_proj", "M+M", 0), Rows(EXPERTS + "gate_up_proj", "M+M", 1))
SOURCES: dict[str, str | Spec] = {
    FFN + "router.weight": LAYER + "router.proj.weight",
    FFN + "experts.gate_up": Stack(Expert(Glu(*PARTS))),
    FFN + "experts.down": Stack(Expert(EXPERTS + "down_proj")),
}
INPUTS = has_layer_inputs
RULES = (
    *map(with_own_keys, with_sources(without(DECODER, FFN_NORM), SOURCES)),
    *POST_NORMS,
    Rule(FFN_NORM, "D", BEFORE_FFN[FFN_NORM], dense_only, "ones"),
    *MIXTURE,
    Rule("layers.{i}.input.gate.weight", "De D", LAYER + "per_layer_input_gate.weight", INPUTS),
    Rule("layers.{i}.input.out.weight", "D De", LAYER + "per_layer_projection.weight", INPUTS),
    Rule(
        "layers.{i}.input.norm.weight",
        "D",
        LAYER + "post_per_layer_input_norm.weight",
        INPUTS,
        "ones",
    ),
    Rule("layer_embed.table.weight", "Ve LDe", "model.embed_tokens_per_layer.weight", INPUTS),
    Rule("layer_embed.project.weight", "LDe D", "model.per_layer_model_projection.weight", INPUTS),
    Rule("layer_embed.norm.weight", "De", "model.per_layer_projection_norm.weight", INPUTS, "ones"),
    Rule("layers.{i}.scale", "1", LAYER + "layer_scalar", has_layer_scale, "ones"),
)

SPEC = ModelSpec(
    family="gemma4_text",
    rules=RULES,
    read_dims=ConfigReader(
        defaults=DEFAULTS,
        mlp_bias=False,
        qk_norm=True,
        post_norms=True,
        activation=("hidden_activation", "gelu_tanh"),
        mixture=mixture,
        more=differences,
        refused={
            "rope_scaling": "rotary settings beside rope_parameters",
        },
        sliding_theta=("rope_local_base_freq", 1e4),
        slides=slides,
        window_switch=True,
    ),
    # transformers has no scalar model of it; the second is how it would be called.
    classes=("Gemma4ForCausalLM", "Gemma4ForSequenceClassification"),
    variants={
        "rotary of a part, limited logits": {
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 1.7,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 55.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.4,
                    "rope_theta": 333.0,
                },
            },
        },
        "mixture": {
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "top_k_experts": 2,
        },
        "shared keys": {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    },
    # Text towers, with the table of per-layer embeddings.
    public={
        "google/gemma-4-31B": sizes(
            *(5376, 21504, 60, 32, 16, 262144), **LARGE, num_global_key_value_heads=4
        ),
        "google/gemma-4-26B-A4B": sizes(
            *(2816, 2112, 30, 16, 8, 262144),
            **LARGE,
            num_global_key_value_heads=2,
            enable_moe_block=True,
            num_experts=128,
            top_k_experts=8,
            moe_intermediate_size=704,
        ),
        "google/gemma-4-E2B": sizes(
            *(1536, 6144, 35, 8, 1, 262144),
            **SMALL,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
            layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        ),
        "google/gemma-4-E4B": sizes(
            *(2560, 10240, 42, 8, 2, 262144), **SMALL, num_kv_shared_layers=18
        ),
    },
    model="pentad.models.layer_inputs:SharingDecoder",
    # Unused tensors in released folders, of layers that read the keys and values of others.
    ignored=tuple(
        f"{LAYER}self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    ),
)
