"""Weight maps: declarative mapping of each tensor of a model to regions of HF-on-disk tensors.

A `Rule` names a target tensor, its global shape in symbols, and the location of its elements in the
source name space. For a model's own map the target is the native tensor and the source the
HF-on-disk one; another column (Megatron) is a list of rules whose sources are native names. A
`WeightMap` is a list of rules at given sizes: the regions in both directions, verified to be exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.weights.regions import (
    DimRun,
    Lookup,
    Region,
    Shape,
    coverage_fault,
    flip,
    join,
    whole_region,
)

Condition = Callable[[ModelDims, int], bool]
"""Whether a rule applies to a model and a layer (0 for rules outside the layers)."""
Init = Literal["normal", "ones", "zeros", "uniform", "log_uniform"]
Sizes = Mapping[str, int]
Indices = Mapping[str, int]


def sizes_of(dims: ModelDims) -> dict[str, int]:
    """Values of the shape symbols. Q and K are the widths of all query and key heads; 2M counts
    interleaved rows of gate and up. For latent attention, Lq and Lk are the latent widths, Lr is Lk
    plus the rotary key, U all heads of keys and values expanded from the latent, O all values. Ve
    is the rows of the table of per-layer embeddings, De the width of one and LDe that of all."""
    return {
        "V": dims.vocab_size,
        "D": dims.hidden_size,
        "Q": dims.num_heads * dims.head_dim,
        "K": dims.num_kv_heads * dims.head_dim,
        "d": dims.head_dim,
        "F": dims.intermediate_size,
        "E": dims.num_experts,
        "R": dims.num_experts,
        "M": dims.moe_intermediate_size,
        "2M": 2 * dims.moe_intermediate_size,
        "H": dims.num_heads,
        "2": 2,
        "S": dims.shared_expert_size,
        **linear_sizes(dims),
        "Ve": dims.layer_embed_rows,
        "De": dims.layer_embed_dim,
        "LDe": dims.num_layers * dims.layer_embed_dim,
        "Lq": dims.q_latent,
        "Lk": dims.kv_latent,
        "Lr": dims.kv_latent + dims.rotary_dim,
        "U": dims.latent_kv_dim,
        "u": dims.plain_dim + dims.v_dim,
        "O": dims.o_dim,
        "o": dims.v_dim,
    }


def linear_sizes(dims: ModelDims) -> dict[str, int]:
    """Symbols of delta nets: widths of all keys, values and value heads, and their widths per key
    head, the unit of sharding."""
    if not dims.linear_key_heads:
        return {}
    widths = {"LK": dims.linear_k_dim, "LV": dims.linear_v_dim, "LH": dims.linear_value_heads}
    shares = {f"{name}1": size // dims.linear_key_heads for name, size in widths.items()}
    return {**widths, **shares, "Lv": dims.linear_value_dim, "Lc": dims.linear_conv}


def size_of(token: str, sizes: Sizes) -> int:
    """Value of a dim token: a symbol, a number, or a sum of them: "D", "2", "Q+K+K"."""
    return sum(int(term) if term.isdigit() else sizes[term] for term in token.split("+"))


class Spec(Protocol):
    """Interface of specs, which locate a target tensor's elements in source tensors."""

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        """The regions that make up a target of that shape."""
        ...


@dataclass(frozen=True, slots=True)
class One:
    """The target is the source tensor itself."""

    source: str

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        return [whole_region(self.source.format(**index), shape)]


@dataclass(frozen=True, slots=True)
class Rows:
    """One of several row blocks of a source; Rows("qkv", "Q+K+K", 1) is the second."""

    source: str
    of: str
    part: int

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        blocks = [size_of(term, sizes) for term in self.of.split("+")]
        assert blocks[self.part] == shape[0], f"{self} does not give {shape[0]} rows"
        (whole,) = One(self.source).regions(shape, sizes, index)
        start = (sum(blocks[: self.part]), *whole.source_start[1:])
        source_shape = (sum(blocks), *shape[1:])
        return [replace(whole, source_shape=source_shape, source_start=start)]


@dataclass(frozen=True, slots=True)
class GroupRows:
    """`Rows` where the blocks repeat in each head: GroupRows("q", "Q+Q", 1, "d") is the second of
    two blocks of d rows, of every head. `unit` is the number of rows of a block in one head, or has
    one symbol for each block."""

    source: str
    of: str
    part: int
    unit: str

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        blocks, names = self.of.split("+"), self.unit.split("+")
        units = [sizes[name] for name in names * (len(blocks) // len(names))]
        num, height = sizes[blocks[self.part]] // units[self.part], units[self.part]
        assert num * height == shape[0], f"{self} does not give {shape[0]} rows"
        (whole,) = One(self.source).regions((height, *shape[1:]), sizes, index)
        rest = whole.source_start[1:]
        return [
            replace(
                whole,
                source_shape=(num * sum(units), *shape[1:]),
                source_start=(group * sum(units) + sum(units[: self.part]), *rest),
                target_start=(group * height, *rest),
            )
            for group in range(num)
        ]


@dataclass(frozen=True, slots=True)
class OnlyRow:
    """The target is the single row of a source: [E] of [1, E]."""

    source: str

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        (whole,) = One(self.source).regions((1, *shape), sizes, index)
        runs = tuple(DimRun(dim + 1, dim, length) for dim, length in enumerate(shape))
        return [replace(whole, target_start=(0,) * len(shape), runs=runs)]


@dataclass(frozen=True, slots=True)
class Transposed:
    """The target is the source with its last two dims swapped."""

    source: str

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        *lead, rows, cols = shape
        row = len(lead)
        source_dims = (*range(row), row + 1, row)
        runs = tuple(DimRun(at, dim, shape[dim]) for dim, at in enumerate(source_dims))
        zeros = (0,) * len(shape)
        return [Region(self.source.format(**index), (*lead, cols, rows), zeros, zeros, runs)]


@dataclass(frozen=True, slots=True)
class Glu:
    """Gate and up stacked on a new leading axis: target [2, ...], gate first."""

    gate: str | Spec
    up: str | Spec

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        assert shape[0] == 2, f"a gate and up pair has shape [2, ...], not {list(shape)}"
        halves = [as_spec(half).regions(shape[1:], sizes, index) for half in (self.gate, self.up)]
        return [_plane(region, j) for j, half in enumerate(halves) for region in half]


@dataclass(frozen=True, slots=True)
class StackedGlu:
    """Gate and up of stacked experts, which are one row block after the other in a source: target
    [E, 2, M, D] of [E, M+M, D]."""

    source: str

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        num, two, height, width = shape
        assert two == 2, f"a gate and up pair has shape [E, 2, ...], not {list(shape)}"
        runs = (DimRun(0, 0, num), DimRun(1, 2, height), DimRun(2, 3, width))
        name, source_shape = self.source.format(**index), (num, 2 * height, width)
        return [
            Region(name, source_shape, (0, j * height, 0), (0, j, 0, 0), runs) for j in range(2)
        ]


@dataclass(frozen=True, slots=True)
class Stack:
    """Experts stacked on a new leading axis; {e} in the sources counts along it."""

    each: str | Spec

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        spec = as_spec(self.each)
        return [
            _plane(region, e)
            for e in range(shape[0])
            for region in spec.regions(shape[1:], sizes, {**index, "e": e})
        ]


@dataclass(frozen=True, slots=True)
class Qkv:
    """Query, key and value rows fused by query group: q heads, k and v of each group in turn."""

    q: str
    k: str
    v: str

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        num_groups = sizes["K"] // sizes["d"]
        heights = (sizes["Q"] // num_groups, sizes["d"], sizes["d"])
        out, row = [], 0
        for group in range(num_groups):
            for source, height in zip((self.q, self.k, self.v), heights, strict=True):
                source_shape = (height * num_groups, *shape[1:])
                (whole,) = One(source).regions((height, *shape[1:]), sizes, index)
                rest = whole.source_start[1:]
                out.append(
                    replace(
                        whole,
                        source_shape=source_shape,
                        source_start=(group * height, *rest),
                        target_start=(row, *rest),
                    )
                )
                row += height
        return out


@dataclass(frozen=True, slots=True)
class Planes:
    """Flattens the source's leading axis into rows: [2, F, D] as [F+F, D]."""

    source: str

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        height, rest = shape[0] // 2, shape[1:]
        halves = [One(self.source).regions((height, *rest), sizes, index)[0] for _ in range(2)]
        zeros = (0,) * len(rest)
        return [
            replace(
                half,
                source_shape=(2, height, *rest),
                source_start=(j, 0, *zeros),
                target_start=(j * height, *zeros),
                runs=tuple(DimRun(r.source_dim + 1, r.target_dim, r.length) for r in half.runs),
            )
            for j, half in enumerate(halves)
        ]


@dataclass(frozen=True, slots=True)
class Expert:
    """Expert {e} of a source in which all experts are stacked on the leading axis."""

    inner: str | Spec

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        return [
            replace(
                region,
                source_shape=(sizes["E"], *region.source_shape),
                source_start=(index["e"], *region.source_start),
                runs=tuple(DimRun(r.source_dim + 1, r.target_dim, r.length) for r in region.runs),
            )
            for region in as_spec(self.inner).regions(shape, sizes, index)
        ]


@dataclass(frozen=True, slots=True)
class Padded:
    """The source, padded with zero rows at the end; the padding is never read back."""

    source: str
    rows: str

    def regions(self, shape: Shape, sizes: Sizes, index: Indices) -> list[Region]:
        return One(self.source).regions((size_of(self.rows, sizes), *shape[1:]), sizes, index)


def _plane(region: Region, j: int) -> Region:
    """Moves the region to index j of a new leading target dim."""
    runs = tuple(DimRun(run.source_dim, run.target_dim + 1, run.length) for run in region.runs)
    return replace(region, target_start=(j, *region.target_start), runs=runs)


def as_spec(source: str | Spec) -> Spec:
    return One(source) if isinstance(source, str) else source


def always(dims: ModelDims, layer: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a map. {i} counts layers, {e} experts.

    Example: Rule("layers.{i}.ffn.gate_up.weight", "2 F D", Glu("...gate_proj", "...up_proj"))
    """

    target: str
    shape: str
    """Symbols of `sizes_of`, one per dim; the parallel plan selects those that are split."""
    source: str | Spec
    when: Condition = always
    init: Init = "normal"
    tied: str = ""
    """With tied embeddings this target is a copy of that other target and has no source."""
    optional: bool = False
    """Whether the source may be missing on disk; the target is then initialised."""
    dtype: str = ""
    """Fixed dtype, such as float32; empty: the model's."""
    alias: tuple[str, ...] = ()
    """Other names that files of this column use for the same target."""
    is_factor: bool = False
    """Whether it is an adapter's factor, which is not sharded: each rank has the part it needs."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One target tensor of a map, with its rule expanded at given sizes."""

    name: str
    shape: Shape
    regions: tuple[Region, ...]
    rule: Rule
    layer: int | None
    """Index of the layer; None outside the layers."""
    sizes: Sizes = field(default_factory=dict)
    """Values of the symbols of the rule's shape in this layer."""
    expert: int | None = None
    """Index of the expert, for targets of a single expert."""
    is_copy: bool = False
    """Whether it is filled from the sources of its tied tensor, and never written."""


@dataclass(frozen=True, slots=True)
class Source:
    """One source tensor, as regions of target tensors."""

    name: str
    shape: Shape
    regions: tuple[Region, ...]
    init: Init
    optional: bool
    layer: int | None
    dtype: str = ""
    """Fixed dtype, such as float32; empty: the model's."""


@dataclass(frozen=True)
class WeightMap:
    """Expanded rules at given sizes, by target and by source. Both tables are in layer order."""

    dims: ModelDims
    entries: Mapping[str, Entry]
    """Target name -> entry."""
    sources: Mapping[str, Source]
    """Source name -> the same regions, inverted."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Source names that some folders have, and the equal source of each."""
    ignored: frozenset[str] = frozenset()
    """Source names that may be present and are not used."""
    ignored_prefixes: tuple[str, ...] = ()
    """Prefixes of further such names."""

    def ignores(self, name: str) -> bool:
        is_left_out = name in self.ignored or name.startswith(self.ignored_prefixes)
        return is_left_out or self.is_other(name)

    def is_other(self, name: str) -> bool:
        """Whether a multimodal tensor is outside the text tower; exports copy it."""
        if name in self.sources or name.startswith(self.ignored_prefixes):
            return False
        return self.dims.is_beside_text(name)


def build_map(
    rules: Sequence[Rule],
    dims: ModelDims,
    *,
    ignored: Sequence[str] = (),
    extra_sizes: Sizes | None = None,
) -> WeightMap:
    """Expands the rules; rejects a map that does not cover every element exactly once."""
    found: dict[str, Sizes] = {}
    entries: dict[str, Entry] = {}
    tied: dict[str, str] = {}
    for rule, index in _in_layer_order(rules, dims):
        own = str(dims.own[index["i"]]) if dims.own and "i" in index else ""
        if own not in found:
            at = dims.of_layer(index["i"]) if own else dims
            found[own] = {**sizes_of(at), **(extra_sizes or {})}
        sizes, name = found[own], rule.target.format(**index)
        if name in entries:
            raise _wrong_map(dims, name, "two rules give this tensor")
        shape = tuple(size_of(token, sizes) for token in rule.shape.split())
        regions = tuple(as_spec(rule.source).regions(shape, sizes, index))
        is_copy = bool(rule.tied) and dims.tie_embeddings
        if is_copy:
            tied[regions[0].source] = entries[rule.tied].regions[0].source
            regions = entries[rule.tied].regions
        place = {"layer": index.get("i"), "expert": index.get("e")}
        entries[name] = Entry(name, shape, regions, rule, sizes=sizes, is_copy=is_copy, **place)
    extra = range(dims.num_layers, dims.num_layers + dims.num_mtp_layers)
    skipped = {
        name.format(i=i, n=n)
        for name in ignored
        for i in range(dims.num_layers)
        for n in (extra if "{n}" in name else (0,))
    }
    prefixes = tuple(sorted(name.removesuffix("*") for name in skipped if name.endswith("*")))
    names = frozenset(name for name in skipped if not name.endswith("*"))
    return WeightMap(dims, entries, sources_of(entries, dims), tied, names, prefixes)


def through(outer: WeightMap, inner: WeightMap) -> WeightMap:
    """Composes a map over native names and the native map into one map over HF names."""
    native = {name: Lookup(entry.regions) for name, entry in inner.entries.items()}
    entries = {
        name: replace(entry, regions=tuple(join(entry.regions, native)))
        for name, entry in outer.entries.items()
    }
    return replace(inner, entries=entries, sources=sources_of(entries, inner.dims))


def between(own: WeightMap, other: WeightMap) -> dict[str, list[Region]]:
    """The targets of one map as regions of the targets of another map with the same sources."""
    inner = {name: Lookup(source.regions) for name, source in other.sources.items()}
    return {
        name: join(entry.regions, inner)
        for name, entry in own.entries.items()
        if all(region.source in inner for region in entry.regions)
    }


def _in_layer_order(rules: Sequence[Rule], dims: ModelDims) -> list[tuple[Rule, dict[str, int]]]:
    """Rules before the layers, the layer rules for each layer, rules after; conditions applied."""
    inside = [rule for rule in rules if "{i}" in rule.target]
    first = rules.index(inside[0]) if inside else len(rules)
    outside = [rule for rule in rules[first:] if rule not in inside]
    before: list[tuple[Rule, dict[str, int]]] = [(rule, {}) for rule in rules[:first]]
    after: list[tuple[Rule, dict[str, int]]] = [(rule, {}) for rule in outside]
    layers = [
        (rule, index)
        for i in range(dims.num_layers)
        for rule in inside
        for index in _expert_indices(rule, dims, i)
    ]
    every = [*before, *layers, *after]
    return [(rule, index) for rule, index in every if rule.when(dims, index.get("i", 0))]


def _expert_indices(rule: Rule, dims: ModelDims, layer: int) -> list[dict[str, int]]:
    if "{e}" not in rule.target:
        return [{"i": layer}]
    return [{"i": layer, "e": e} for e in range(dims.num_experts)]


def sources_of(entries: Mapping[str, Entry], dims: ModelDims) -> dict[str, Source]:
    """Inverts entries to a table by source; raises unless every element is covered once."""
    shapes: dict[str, Shape] = {}
    regions: dict[str, list[Region]] = {}
    first: dict[str, Entry] = {}
    for entry in entries.values():
        _check_target(entry, dims)
        if entry.is_copy:
            continue
        for region in entry.regions:
            known = shapes.setdefault(region.source, region.source_shape)
            if known != region.source_shape:
                rule = f"two rules give it shapes {list(known)} and {list(region.source_shape)}"
                raise _wrong_map(dims, region.source, rule)
            first.setdefault(region.source, entry)
            flipped = flip(region, entry.name, entry.shape)
            regions.setdefault(region.source, []).append(flipped)
    for name, parts in regions.items():
        fault = coverage_fault([part.target_box for part in parts], shapes[name])
        if fault:
            raise _wrong_map(dims, name, fault)
    return {
        name: Source(
            name,
            shapes[name],
            tuple(parts),
            rule.init,
            rule.optional,
            first[name].layer,
            rule.dtype,
        )
        for name, parts in regions.items()
        for rule in [first[name].rule]
    }


def _check_target(entry: Entry, dims: ModelDims) -> None:
    boxes = [region.target_box for region in entry.regions]
    fault = coverage_fault(boxes, entry.shape, gaps=isinstance(entry.rule.source, Padded))
    if fault:
        raise _wrong_map(dims, entry.name, fault)


def _wrong_map(dims: ModelDims, name: str, rule: str) -> UserError:
    return UserError(Problem(f"weight map of {dims.family}, {name}", rule, "correct the rule"))
