"""Declarations for model files: `ModelSpec`, and rules that families share; data only, no torch.

`DECODER` has the usual HF-on-disk names. `MEGATRON`, joined with a family's map
(`weights.map.through`), gives Megatron's tensors as regions of HF-on-disk ones, so it is written
once for all families: names of the Transformer-Engine layer spec, with those of the local spec and
of sequential experts as aliases. Layer and expert numbers are global here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pentad.core.dims import ModelDims
from pentad.models.config_reader import dims_from_hf
from pentad.models.towers import in_tower
from pentad.weights.cuts import Seam
from pentad.weights.map import (
    Condition,
    Expert,
    Glu,
    GroupRows,
    Init,
    Padded,
    Planes,
    Qkv,
    Rows,
    Rule,
    Spec,
    Stack,
    WeightMap,
    build_map,
    through,
)


def has_bias(dims: ModelDims, layer: int) -> bool:
    return dims.qkv_bias


def has_out_bias(dims: ModelDims, layer: int) -> bool:
    return dims.out_bias


def has_keys(dims: ModelDims, layer: int) -> bool:
    return dims.of_layer(layer).num_kv_matrices > 0


def has_values(dims: ModelDims, layer: int) -> bool:
    return dims.of_layer(layer).num_kv_matrices > 1


def has_dense_beside(dims: ModelDims, layer: int) -> bool:
    return dims.is_moe(layer) and dims.has_dense_beside


def has_layer_inputs(dims: ModelDims, layer: int) -> bool:
    return dims.layer_embed_dim > 0


def has_layer_scale(dims: ModelDims, layer: int) -> bool:
    return dims.layer_scale


def has_sinks(dims: ModelDims, layer: int) -> bool:
    return dims.attn_sinks


def has_qk_norm(dims: ModelDims, layer: int) -> bool:
    return dims.qk_norm


def has_wide_qk_norm(dims: ModelDims, layer: int) -> bool:
    return dims.qk_norm and dims.wide_qk_norm


def is_moe(dims: ModelDims, layer: int) -> bool:
    return dims.is_moe(layer)


def has_shared_expert(dims: ModelDims, layer: int) -> bool:
    return dims.is_moe(layer) and bool(dims.shared_expert_size)


def has_shared_gate(dims: ModelDims, layer: int) -> bool:
    return has_shared_expert(dims, layer) and dims.shared_expert_gate


def has_router_bias(dims: ModelDims, layer: int) -> bool:
    return dims.is_moe(layer) and dims.router_bias


def is_dense(dims: ModelDims, layer: int) -> bool:
    return not dims.is_moe(layer)


def has_mlp_bias(dims: ModelDims, layer: int) -> bool:
    return dims.mlp_bias and not dims.is_moe(layer)


ATTN = "layers.{i}.attn."
FFN = "layers.{i}.ffn."
ATTN_NORM, ATTN_POST_NORM = "layers.{i}.attn_norm.weight", "layers.{i}.attn_post_norm.weight"
FFN_NORM, FFN_POST_NORM = "layers.{i}.ffn_norm.weight", "layers.{i}.ffn_post_norm.weight"
LAYER = "model.layers.{i}."
EXPERT = LAYER + "mlp.experts.{e}."


def gated(native: str, shape: str, hf: str, kind: str, when: Condition, init: Init) -> Rule:
    """A rule for gate and up on a separate axis, from separate tensors in files."""
    sources = Glu(f"{hf}gate_proj{kind}", f"{hf}up_proj{kind}")
    return Rule(f"{native}gate_up{kind}", shape, sources, when, init)


DECODER = (
    Rule("embed.weight", "V D", "model.embed_tokens.weight"),
    Rule(ATTN_NORM, "D", LAYER + "input_layernorm.weight", init="ones"),
    Rule(ATTN + "q.weight", "Q D", LAYER + "self_attn.q_proj.weight"),
    Rule(ATTN + "k.weight", "K D", LAYER + "self_attn.k_proj.weight"),
    Rule(ATTN + "v.weight", "K D", LAYER + "self_attn.v_proj.weight"),
    Rule(ATTN + "o.weight", "D Q", LAYER + "self_attn.o_proj.weight"),
    Rule(ATTN + "q.bias", "Q", LAYER + "self_attn.q_proj.bias", has_bias, "zeros"),
    Rule(ATTN + "k.bias", "K", LAYER + "self_attn.k_proj.bias", has_bias, "zeros"),
    Rule(ATTN + "v.bias", "K", LAYER + "self_attn.v_proj.bias", has_bias, "zeros"),
    Rule(ATTN + "o.bias", "D", LAYER + "self_attn.o_proj.bias", has_out_bias, "zeros"),
    Rule(ATTN + "q_norm.weight", "d", LAYER + "self_attn.q_norm.weight", has_qk_norm, "ones"),
    Rule(ATTN + "k_norm.weight", "d", LAYER + "self_attn.k_norm.weight", has_qk_norm, "ones"),
    Rule(FFN_NORM, "D", LAYER + "post_attention_layernorm.weight", init="ones"),
    gated(FFN, "2 F D", LAYER + "mlp.", ".weight", is_dense, "normal"),
    Rule(FFN + "down.weight", "D F", LAYER + "mlp.down_proj.weight", is_dense),
    gated(FFN, "2 F", LAYER + "mlp.", ".bias", has_mlp_bias, "zeros"),
    Rule(FFN + "down.bias", "D", LAYER + "mlp.down_proj.bias", has_mlp_bias, "zeros"),
    Rule(FFN + "router.weight", "R D", LAYER + "mlp.gate.weight", is_moe),
    Rule(
        FFN + "experts.gate_up",
        "E 2 M D",
        Stack(Glu(EXPERT + "gate_proj.weight", EXPERT + "up_proj.weight")),
        is_moe,
    ),
    Rule(FFN + "experts.down", "E D M", Stack(EXPERT + "down_proj.weight"), is_moe),
    Rule("norm.weight", "D", "model.norm.weight", init="ones"),
    Rule("head.weight", "V D", "lm_head.weight", tied="embed.weight"),
    Rule("value_head.weight", "1 D", "score.weight", optional=True),
)
"""Rules with the names of Llama and Qwen; conditions on dimensions select the tensors."""


POST_NORMS = (
    Rule(ATTN_POST_NORM, "D", LAYER + "post_attention_layernorm.weight", init="ones"),
    Rule(FFN_POST_NORM, "D", LAYER + "post_feedforward_layernorm.weight", init="ones"),
)
"""Rules for norms of the outputs of attention and ffn."""


def around_zero(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules, with norms stored as offsets from 1 (weights around 0)."""
    return tuple(
        replace(rule, init="zeros") if rule.target.endswith("norm.weight") else rule
        for rule in rules
    )


def without(rules: tuple[Rule, ...], *targets: str) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if rule.target not in targets)


def with_sources(rules: tuple[Rule, ...], sources: Mapping[str, str | Spec]) -> tuple[Rule, ...]:
    """The rules, with other file names for some native tensors."""
    unknown = sources.keys() - {rule.target for rule in rules}
    assert not unknown, f"no rule for {', '.join(sorted(unknown))}"
    return tuple(replace(r, source=sources.get(r.target, r.source)) for r in rules)


FUSED_GATE_UP: dict[str, str | Spec] = {
    FFN + "gate_up.weight": Glu(
        *(Rows(LAYER + "mlp.gate_up_proj.weight", "F+F", part) for part in range(2))
    )
}
"""Sources for gate and up as one tensor, gate first."""
FUSED_QKV: dict[str, str | Spec] = {
    f"{ATTN}{name}.weight": Rows(LAYER + "self_attn.qkv_proj.weight", "Q+K+K", part)
    for part, name in enumerate("qkv")
}
"""Sources for queries, keys and values as one tensor, in this order."""


def shared_expert(hf: str) -> tuple[Rule, ...]:
    """Rules for a shared expert, by the name of its module in files."""
    place = f"{LAYER}mlp.{hf}."
    return (
        gated(FFN + "shared.", "2 S D", place, ".weight", has_shared_expert, "normal"),
        Rule(FFN + "shared.down.weight", "D S", place + "down_proj.weight", has_shared_expert),
    )


def wide_routers(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The rules, with routers kept in float32."""
    name = FFN + "router.weight"
    return tuple(replace(r, dtype="float32") if r.target == name else r for r in rules)


def selection_bias(source: str | Spec) -> Rule:
    """Rule for the router's bias that is used only for selection, kept in float32."""
    return Rule(FFN + "router.bias", "R", source, has_router_bias, "zeros", dtype="float32")


def is_linear(dims: ModelDims, layer: int) -> bool:
    return dims.is_linear(layer)


OWN_KEYS = {
    **{f"{ATTN}{name}": has_keys for name in ("k.weight", "k.bias", "k_norm.weight")},
    **{f"{ATTN}{name}": has_values for name in ("v.weight", "v.bias")},
}


def with_own_keys(rule: Rule) -> Rule:
    """The rule, only in layers with their own key and value projections."""
    if rule.target not in OWN_KEYS:
        return rule
    when, has_own = rule.when, OWN_KEYS[rule.target]
    return replace(rule, when=lambda dims, layer: when(dims, layer) and has_own(dims, layer))


def _with_attention(rule: Rule) -> Rule:
    """The rule, only in layers without a delta net."""
    if not rule.target.startswith(ATTN):
        return rule
    when = rule.when
    return replace(rule, when=lambda dims, layer: when(dims, layer) and not dims.is_linear(layer))


Q_AND_GATE: dict[str, str | Spec] = {
    f"{ATTN}{name}.{kind}": GroupRows(f"{LAYER}self_attn.q_proj.{kind}", "Q+Q", part, "d")
    for part, name in enumerate(("q", "gate"))
    for kind in ("weight", "bias")
}
"""Sources for queries and output gate of each head as one block of rows."""
GATED_DECODER = with_sources(
    (
        *map(_with_attention, DECODER),
        _with_attention(Rule(ATTN + "gate.weight", "Q D", "")),
        _with_attention(Rule(ATTN + "gate.bias", "Q", "", has_bias, "zeros")),
    ),
    Q_AND_GATE,
)
"""`DECODER` with gated attention, except in layers with a delta net."""


def delta_net(projections: Mapping[str, Spec | str]) -> tuple[Rule, ...]:
    """The rules of layers with a gated delta net; `projections`: names of the projections to q, k,
    v, z, b and a in files."""
    place = LAYER + "linear_attn."
    rows = {"q": "LK", "k": "LK", "v": "LV", "z": "LV", "b": "LH", "a": "LH"}
    conv = [Rows(place + "conv1d.weight", "LK+LK+LV", part) for part in range(3)]
    return (
        *(
            Rule(f"{ATTN}in_{name}.weight", f"{rows[name]} D", source, is_linear)
            for name, source in projections.items()
        ),
        *(
            Rule(f"{ATTN}conv_{name}", f"{rows[name]} 1 Lc", source, is_linear)
            for name, source in zip("qkv", conv, strict=True)
        ),
        Rule(ATTN + "a_log", "LH", place + "A_log", is_linear, "log_uniform"),
        Rule(ATTN + "dt_bias", "LH", place + "dt_bias", is_linear, "ones"),
        Rule(ATTN + "norm.weight", "Lv", place + "norm.weight", is_linear, "ones"),
        Rule(ATTN + "o.weight", "D LV", place + "out_proj.weight", is_linear),
    )


THEIRS = "decoder.layers.{i}."

MEGATRON = (
    Rule("embedding.word_embeddings.weight", "Vp D", Padded("embed.weight", "V")),
    Rule(
        THEIRS + "self_attention.linear_qkv.layer_norm_weight",
        "D",
        ATTN_NORM,
        alias=(THEIRS + "input_layernorm.weight",),
    ),
    Rule(
        THEIRS + "self_attention.linear_qkv.weight",
        "P D",
        Qkv(ATTN + "q.weight", ATTN + "k.weight", ATTN + "v.weight"),
    ),
    Rule(
        THEIRS + "self_attention.linear_qkv.bias",
        "P",
        Qkv(ATTN + "q.bias", ATTN + "k.bias", ATTN + "v.bias"),
        has_bias,
    ),
    Rule(THEIRS + "self_attention.linear_proj.weight", "D Q", ATTN + "o.weight"),
    Rule(THEIRS + "self_attention.linear_proj.bias", "D", ATTN + "o.bias", has_out_bias),
    Rule(THEIRS + "self_attention.q_layernorm.weight", "d", ATTN + "q_norm.weight", has_qk_norm),
    Rule(THEIRS + "self_attention.k_layernorm.weight", "d", ATTN + "k_norm.weight", has_qk_norm),
    Rule(
        THEIRS + "mlp.linear_fc1.layer_norm_weight",
        "D",
        FFN_NORM,
        is_dense,
        alias=(THEIRS + "pre_mlp_layernorm.weight",),
    ),
    Rule(THEIRS + "pre_mlp_layernorm.weight", "D", FFN_NORM, is_moe),
    Rule(THEIRS + "mlp.linear_fc1.weight", "F+F D", Planes(FFN + "gate_up.weight"), is_dense),
    Rule(THEIRS + "mlp.linear_fc1.bias", "F+F", Planes(FFN + "gate_up.bias"), has_mlp_bias),
    Rule(THEIRS + "mlp.linear_fc2.weight", "D F", FFN + "down.weight", is_dense),
    Rule(THEIRS + "mlp.linear_fc2.bias", "D", FFN + "down.bias", has_mlp_bias),
    Rule(THEIRS + "mlp.router.weight", "R D", FFN + "router.weight", is_moe),
    Rule(
        THEIRS + "mlp.router.expert_bias",
        "R",
        FFN + "router.bias",
        has_router_bias,
        dtype="float32",
    ),
    Rule(
        THEIRS + "mlp.experts.linear_fc1.weight{e}",
        "M+M D",
        Expert(Planes(FFN + "experts.gate_up")),
        is_moe,
        alias=(THEIRS + "mlp.experts.local_experts.{e}.linear_fc1.weight",),
    ),
    Rule(
        THEIRS + "mlp.experts.linear_fc2.weight{e}",
        "D M",
        Expert(FFN + "experts.down"),
        is_moe,
        alias=(THEIRS + "mlp.experts.local_experts.{e}.linear_fc2.weight",),
    ),
    Rule(
        THEIRS + "mlp.shared_experts.linear_fc1.weight",
        "S+S D",
        Planes(FFN + "shared.gate_up.weight"),
        has_shared_expert,
    ),
    Rule(
        THEIRS + "mlp.shared_experts.linear_fc2.weight",
        "D S",
        FFN + "shared.down.weight",
        has_shared_expert,
    ),
    Rule(
        THEIRS + "mlp.shared_experts.gate_weight",
        "1 D",
        FFN + "shared.gate.weight",
        has_shared_gate,
    ),
    Rule("decoder.final_layernorm.weight", "D", "norm.weight"),
    Rule(
        "output_layer.weight",
        "Vp D",
        Padded("head.weight", "V"),
        tied="embedding.word_embeddings.weight",
    ),
)

MEGATRON_PLAN = {"Vp": "tp", "P": "tp", "Q": "tp", "F": "tp", "S": "tp", "M": "etp"}
"""P is the interleaved qkv, split in plain rows; whole experts are distributed by their number."""


def padded_vocab(vocab_size: int, tp: int, divisor: int = 128) -> int:
    """Megatron's vocabulary: the next multiple of divisor * tp, so it depends on the layout."""
    step = divisor * tp
    return -(-vocab_size // step) * step


def megatron_sizes(dims: ModelDims, vocab_rows: int) -> dict[str, int]:
    """Values of the symbols that only Megatron's column uses."""
    return {"P": (dims.num_heads + 2 * dims.num_kv_heads) * dims.head_dim, "Vp": vocab_rows}


DECODER_SEAMS = (
    Seam("embed", "lookup"),
    Seam("layer_embed.table", "lookup", has_layer_inputs),
    Seam("layers.{i}.attn", "gather"),
    Seam("layers.{i}.attn.q_norm", "norm", has_wide_qk_norm),
    Seam("layers.{i}.attn.k_norm", "norm", has_wide_qk_norm),
    Seam("layers.{i}.attn.o", "scatter"),
    Seam("layers.{i}.ffn", "gather", is_dense),
    Seam("layers.{i}.ffn.down", "scatter", is_dense),
    Seam("layers.{i}.ffn.dense", "gather", has_dense_beside),
    Seam("layers.{i}.ffn.dense.down", "scatter", has_dense_beside),
)
"""Seams of `decoder.Decoder`. Mixtures have none: they compute each rank's own tokens."""
DECODER_PLAN = {"V": "tp", "Ve": "tp", "Q": "tp", "K": "tp", "F": "tp", "E": "ep", "M": "etp"}
DELTA_PLAN = {**DECODER_PLAN, "LK": "tp", "LV": "tp", "LH": "tp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model family. A module that holds one as SPEC is a model file."""

    family: str
    """HF `model_type`."""
    rules: tuple[Rule, ...] = DECODER
    """The weight map: native tensors as regions of HF-on-disk tensors."""
    plan: Mapping[str, str] = field(default_factory=lambda: DECODER_PLAN)
    """The parallel plan: size symbol -> mesh axis that splits every dim of that symbol."""
    seams: tuple[Seam, ...] = DECODER_SEAMS
    """Positions at which tensor parallelism gathers and splits tokens."""
    read_dims: Callable[[Mapping[str, Any]], ModelDims] = dims_from_hf
    """The config adapter: the dimensions from a HF config."""
    public: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Public models by name, with the relevant keys of their config.json, so that a run can be
    planned before a download (see `sizes`)."""
    model: str = "pentad.models.decoder:Decoder"
    """Class of the model, built from the dimensions, as module:name."""
    classes: tuple[str, str] = ("", "")
    """transformers' classes for the causal model and for the one with a scalar head."""
    megatron: tuple[Rule, ...] = MEGATRON
    """Megatron's tensors as regions of the native ones."""
    ignored: tuple[str, ...] = ()
    """HF-on-disk names in some folders that the model does not use: {i} is a layer, {n} a
    multi-token-prediction layer after the last, * at the end any suffix."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Name -> config changes specific to this family, which `verify-model` tests in addition to
    those of all families."""
    saved_config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a saved folder's config.json that change if the folder holds less."""

    def weight_map(self, dims: ModelDims) -> WeightMap:
        own = build_map(self.rules, dims, ignored=self.ignored)
        return in_tower(own, dims.tower_names) if dims.tower_names else own

    def megatron_map(self, dims: ModelDims, vocab_rows: int) -> WeightMap:
        """Megatron's tensors, with this many vocabulary rows, as regions of HF-on-disk ones."""
        sizes = megatron_sizes(dims, vocab_rows)
        column = build_map(self.megatron, dims, extra_sizes=sizes)
        return through(column, self.weight_map(dims))


def sizes(
    *of: int, tied: bool = False, rope_theta: float = 1e6, max_position: int = 32768, **more: Any
) -> dict[str, Any]:
    """The config of a public model, from its hidden and intermediate size, layers, heads, key
    heads and vocabulary; positions and norms of a checkpoint are those of its own config.json."""
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "vocab_size"),
    )
    found = dict(zip(names, of, strict=True), tie_word_embeddings=tied, rope_theta=rope_theta)
    return {**found, "max_position_embeddings": max_position, **more}
