"""The weight map of a LoRA adapter, derived from that of its model: two factors for each matrix.

A matrix "O I" that lies in files as MODULE.weight gets A "r I" and B "O r", which lie there as
MODULE.lora_A.weight and MODULE.lora_B.weight. Gate and up, and stacked experts, keep their leading
axes. So a layout that cuts O cuts B, one that cuts I cuts A, and every other way of a weight
(shards, publishing, checkpoints) is that of the model's own.
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
    "gate": (".ffn.gate_up.weight", ".shared.gate_up.weight"),
    "up": (".ffn.gate_up.weight", ".shared.gate_up.weight"),
    "down": (".ffn.down.weight", ".shared.down.weight"),
    "experts": (".experts.gate_up", ".experts.down"),
}
"""Word of a recipe -> how the native names of its matrices end."""
HIDDEN = "D"
VALUE_HEAD = "value_head.weight"
NO_FACTORS = {
    "head": "log-probs are computed together with the head, which has no factors",
    "router": "experts would be chosen by other numbers than the sampler's",
    "embed": "a table of tokens has no factors",
}


def target_words(rules: Sequence[Rule], dims: ModelDims) -> list[str]:
    """The words for which a model has matrices that can be given factors."""
    return _words([rule for rule in _held(rules, dims) if _is_apart(as_spec(rule.source))])


def fused_words(rules: Sequence[Rule], dims: ModelDims) -> list[str]:
    """The words for matrices that share one tensor of the files. An adapter's file would have one
    A for all of them, and here each has its own."""
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
    """What is wrong with the targets for a model that has these words; `fused` are those of
    `fused_words`. A critic without any trains its head alone."""
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
    if ("gate" in lora.targets) != ("up" in lora.targets):
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
    """The factors of an adapter as regions of the tensors of its file. A factor that experts share
    lies there once, under the name of its experts without their number. With them the head of a
    critic, which is trained whole."""
    chosen = [rule for rule in rules if _is_target(rule, words)]
    trained = [factor for rule in chosen for factor in _factors(rule, lora.experts)]
    if value_head:
        trained += [
            replace(rule, optional=False, dtype="float32", is_factor=True)
            for rule in rules
            if rule.target == VALUE_HEAD
        ]
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
    """The same place in files, of a factor instead of a weight."""
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
    """Both as one map: how a layout cuts them."""
    if adapter is None:
        return base
    entries = {**base.entries, **adapter.entries}
    return replace(base, sizes={**base.sizes, **adapter.sizes}, entries=entries)
