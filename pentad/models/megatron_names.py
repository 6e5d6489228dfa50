"""Names of weights in Megatron-Core's modules: their weight map, and a model without modules.

The map is the Megatron column of a family in a form that every layout splits into blocks: gate and
up have a separate axis, and the vocabulary is not padded. It does not import Megatron, so that
recovery checkpoints of its learners can be read without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pentad.core.device import DTYPES
from pentad.core.dims import ModelDims
from pentad.models.families import map_of, spec_of
from pentad.models.language_model import FamilyModel
from pentad.models.spec import megatron_sizes
from pentad.weights.map import (
    Entry,
    Expert,
    Planes,
    Rule,
    Spec,
    WeightMap,
    build_map,
    sources_of,
    through,
)

TABLE = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
VALUE_HEAD = "value_head.weight"
SELECTION_BIAS = ".expert_bias"
"""Suffix of the router's bias, which is not a parameter and changes without a gradient."""
PLAN = {"V": "tp", "Vp": "tp", "P": "tp", "Q": "tp", "F": "tp", "S": "tp", "M": "etp"}
"""Symbol -> axis that splits it. Experts are separate tensors, distributed over ep by their
number."""

_MAPS: dict[str, WeightMap] = {}


def learner_map(dims: ModelDims) -> WeightMap:
    """Megatron's tensors as regions of HF-on-disk ones; built once for a model."""
    key = repr(dims)
    if key not in _MAPS:
        _MAPS[key] = _build(dims)
    return _MAPS[key]


def _build(dims: ModelDims) -> WeightMap:
    value_head = Rule(VALUE_HEAD, "1 D", VALUE_HEAD, optional=True)
    rules = [*map(_in_blocks, spec_of(dims.family).megatron), value_head]
    native = map_of(dims)
    column = build_map(rules, dims, extra_sizes=megatron_sizes(dims, dims.vocab_size))
    entries = {name: _as_native(entry, native) for name, entry in column.entries.items()}
    joined = through(replace(column, entries=entries), native)
    return replace(joined, sources=sources_of(joined.entries, dims))


def _in_blocks(rule: Rule) -> Rule:
    """The rule with a separate axis for gate and up, so that a rank's rows are one block."""
    first, *rest = rule.shape.split()
    if "+" not in first:
        return rule
    shape = " ".join(("2", first.partition("+")[0], *rest))
    return replace(rule, shape=shape, source=_without_planes(rule.source))


def _without_planes(source: str | Spec) -> str | Spec:
    if isinstance(source, Expert):
        return Expert(_without_planes(source.inner))
    assert isinstance(source, Planes), f"{source} is no pair of gate and up"
    return source.source


def _as_native(entry: Entry, native: WeightMap) -> Entry:
    """The entry with initialisation and dtype of the native tensor."""
    rule = native.entries[entry.regions[0].source].rule
    kept = replace(
        entry.rule,
        init=rule.init,
        optional=rule.optional,
        dtype=entry.rule.dtype or rule.dtype,
    )
    return replace(entry, rule=kept)


def whole_name(name: str, layers: Sequence[int], first_expert: int) -> str:
    """Translates a name in a stage, where Megatron counts layers per stage and experts per rank, to
    that in the whole model. Transformer Engine's grouped experts are weight0, weight1, ... of one
    module, Megatron's own are modules."""
    words = name.split(".")
    if "layers" in words:
        at = words.index("layers") + 1
        words[at] = str(layers[int(words[at])])
    if "local_experts" in words:
        at = words.index("local_experts") + 1
        words[at] = str(int(words[at]) + first_expert)
    elif "experts" in words and (one := re.fullmatch(r"weight(\d+)", words[-1])):
        words[-1] = f"weight{int(one[1]) + first_expert}"
    return ".".join(words)


class NamedModel(FamilyModel):
    """A model of weights by name, without modules, on the meta device."""

    def __init__(self, dims: ModelDims, tensors: Mapping[str, Tensor], *, lm_head: bool) -> None:
        super().__init__(dims)
        self.tensors = dict(tensors)
        self.has_lm_head = lm_head

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return ((n, x) for n, x in self.tensors.items() if not n.endswith(SELECTION_BIAS))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return ((n, x) for n, x in self.tensors.items() if n.endswith(SELECTION_BIAS))

    @property
    def blocks(self) -> Mapping[int, nn.Module]:
        return {}

    @property
    def weight_map(self) -> WeightMap:
        return learner_map(self.dims)

    @property
    def tables(self) -> set[str]:
        return {TABLE}


def build_named(dims: ModelDims, dtype: torch.dtype, *, value_head: bool = False) -> NamedModel:
    """Builds the whole model without memory. A value head replaces the language-model head."""
    left_out = HEAD if value_head else VALUE_HEAD
    kept = {"": dtype, **DTYPES}
    tensors = {
        name: torch.empty(entry.shape, dtype=kept[entry.rule.dtype], device="meta")
        for name, entry in learner_map(dims).entries.items()
        if name != left_out and not entry.is_copy
    }
    model = NamedModel(dims, tensors, lm_head=not value_head)
    if value_head:
        model.value_head = nn.Linear(dims.hidden_size, 1, bias=False, device="meta", dtype=dtype)
    return model
