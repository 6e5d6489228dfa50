"""Weight map of a LoRA adapter, derived from the map of its model: factors A and B per matrix.

A matrix "O I" stored as MODULE.weight gets A "r I" and B "O r", stored as MODULE.lora_A.weight and
MODULE.lora_B.weight. Gate and up, and stacked experts, keep their leading axes. So a layout that
shards O shards B, one that shards I shards A, and sharding, publishing and checkpoints work as for
the model's weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem
from pentad.engine.section import LoraConfig
from pentad.weights.map import Glu, One, Rule, Spec, Stack, WeightMap, as_spec, build_map

NATIVE = {
    "q": (".attn.q.weight",),
    "k": (".attn.k.weight",),
    "v": (".attn.v.weight",),
    "o": (".attn.o.weight",),
    "q_a": (".attn.q_a.weight",),
    "q_b": (".attn.q_b.weight",),
    "kv_a": (".attn.kv_a.weight",),
    "kv_b": (".attn.kv_b.weight",),
    "gate": (".ffn.gate_up.weight", ".shared.gate_up.weight", ".dense.gate_up.weight"),
    "up": (".ffn.gate_up.weight", ".shared.gate_up.weight", ".dense.gate_up.weight"),
    "down": (".ffn.down.weight", ".shared.down.weight", ".dense.down.weight"),
    "experts": (".experts.gate_up", ".experts.down"),
    "per_layer_input_gate": (".input.gate.weight",),
    "per_layer_projection": (".input.out.weight",),
}
"""Target word of a recipe -> suffix of the native names of its matrices."""
HIDDEN = "D"
VALUE_HEAD = "value_head.weight"
OF_FSDP = " of transformers"
"""Suffix of the family's name if the layers are transformers', not those of a model file."""
NO_FACTORS = {
    "head": "log-probs are computed together with the head, which has no factors",
    "router": "the sampler would choose experts differently",
    "embed": "lookup tables have no factors",
}


def target_words(rules: Sequence[Rule], dims: ModelDims) -> list[str]:
    """LoRA target names (such as "q") for which a model has matrices."""
    return _words([rule for rule in _held(rules, dims) if _is_apart(as_spec(rule.source))])


def fused_words(rules: Sequence[Rule], dims: ModelDims) -> list[str]:
    """Target names whose matrices share one stored tensor. An adapter file would have one A for all
    of them, but here each has its own."""
    return _words([rule for rule in _held(rules, dims) if not _is_apart(as_spec(rule.source))])


def _held(rules: Sequence[Rule], dims: ModelDims) -> list[Rule]:
    layers = range(dims.num_layers)
    return [rule for rule in rules if any(rule.when(dims, layer) for layer in layers)]


def _words(rules: Sequence[Rule]) -> list[str]:
    return [word for word in NATIVE if any(_is_target(rule, [word]) for rule in rules)]


def _is_apart(source: Spec) -> bool:
    match source:
        case One():
            return True
        case Glu(gate, up):
            return _is_apart(as_spec(gate)) and _is_apart(as_spec(up))
        case Stack(each):
            return _is_apart(as_spec(each))
    return False


def target_problems(
    lora: LoraConfig,
    words: Sequence[str],
    family: str,
    fused: Sequence[str] = (),
    role: str = "actor",
) -> list[Problem]:
    """Lists invalid LoRA targets for a model with these names; `fused` is from `fused_words`. A
    critic without targets trains only its head."""
    chosen = [*words, *fused] if lora.targets == "all-linear" else lora.targets
    together = [word for word in chosen if word in fused]
    if together:
        where = f"{role}.lora.targets = {lora.targets}"
        rule = f"{family} holds {', '.join(together)} in shared tensors, which get no factors"
        return [Problem(where, rule, f"name some of {', '.join(words)}")]
    if lora.targets == "all-linear" or (role == "critic" and not lora.targets):
        return []
    where = f"{role}.lora.targets = {list(lora.targets)}"
    unknown = [word for word in lora.targets if word not in words]
    every = f"some of {', '.join(words)}"
    remedy = f"name {every}" if fused else f"use all-linear, or {every}"
    if not lora.targets:
        return [Problem(where, "nothing would be trained", remedy)]
    if unknown:
        reason = NO_FACTORS.get(unknown[0], f"{family} has no {', '.join(unknown)}")
        return [Problem(where, reason, remedy)]
    halves = {"gate", "up"}
    if halves <= set(words) and len(halves & set(lora.targets)) == 1:
        return [Problem(where, "gate and up are one product here", "name both or neither")]
    return []


def lora_map(
    rules: Sequence[Rule],
    dims: ModelDims,
    lora: LoraConfig,
    words: Sequence[str],
    *,
    value_head: bool = False,
) -> WeightMap:
    """Weight map of an adapter's factors over the tensors of its file. A factor shared by experts
    is stored once, under the experts' name without a number. The map also has the head of a critic,
    which is trained fully."""
    heads = [rule for rule in rules if value_head and rule.target == VALUE_HEAD]
    return factor_map([rule for rule in rules if _is_target(rule, words)], heads, dims, lora)


def factor_map(
    matrices: Iterable[Rule], heads: Iterable[Rule], dims: ModelDims, lora: LoraConfig
) -> WeightMap:
    """`lora_map` for matrices that are already selected."""
    trained = [factor for rule in matrices for factor in _factors(rule, lora.experts)]
    trained += [replace(rule, optional=False, dtype="float32", is_factor=True) for rule in heads]
    return build_map(trained, dims, extra_sizes={"r": lora.rank})


def _is_target(rule: Rule, words: Iterable[str]) -> bool:
    return any(rule.target.endswith(NATIVE[word]) for word in words)


def _factors(rule: Rule, experts: str) -> tuple[Rule, Rule]:
    *lead, rows, columns = rule.shape.split()
    place = rule.target.removesuffix(".weight")
    place += ".lora" if place != rule.target else "_lora"
    made = []
    for key, name, tokens in (("a", "lora_A", ["r", columns]), ("b", "lora_B", [rows, "r"])):
        source, axes = as_spec(rule.source), list(lead)
        if experts == "shared_outer" and isinstance(source, Stack) and HIDDEN in tokens:
            source, axes = as_spec(source.each), axes[1:]
        made.append(
            replace(
                rule,
                target=f"{place}.{key}",
                shape=" ".join([*axes, *tokens]),
                source=_factor_of(source, name, is_shared=len(axes) < len(lead)),
                init="uniform" if key == "a" else "zeros",
                dtype="float32",
                is_factor=True,
            )
        )
    first, second = made
    return first, second


def _factor_of(source: Spec, factor: str, *, is_shared: bool) -> Spec:
    """The spec of a weight, changed to refer to a factor of the same module."""
    match source:
        case One(name):
            name = name.replace(".{e}.", ".") if is_shared else name
            return One(f"{name.removesuffix('.weight')}.{factor}.weight")
        case Glu(gate, up):
            both = [_factor_of(as_spec(half), factor, is_shared=is_shared) for half in (gate, up)]
            return Glu(*both)
        case Stack(each):
            return Stack(_factor_of(as_spec(each), factor, is_shared=is_shared))
    raise AssertionError(f"no factors for weights that are stored as {source}")


def merged(base: WeightMap, adapter: WeightMap | None) -> WeightMap:
    """Base and adapter in one map, for the sharding of a layout."""
    if adapter is None:
        return base
    return replace(base, entries={**base.entries, **adapter.entries})
