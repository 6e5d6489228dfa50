"""The interface of models for engines: `LanguageModel`, with two implementations.

`decoder.Decoder` is composed from a family's file, `hf.module.HfModel` is a model of transformers.
Both take flat tokens with positions and the attention core, and are independent of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentad.core.dims import ModelDims
from pentad.core.types import Attend
from pentad.engine.section import LoraConfig
from pentad.models.families import lora_map_of, lora_words, map_of, spec_of
from pentad.models.towers import spelling_of
from pentad.ops.sinks import limited
from pentad.weights.map import Entry, WeightMap

BIAS_OR_NORM = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters that transformers' Trainer does not decay."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """A state that a layer carries from token to token, without the dimension of rows."""

    layer: int
    name: str
    number: int
    """Among the layer's states of this name."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def _is_decayed(entry: Entry) -> bool:
    names = [entry.name, *(region.source for region in entry.regions)]
    is_matrix = all(len(region.source_shape) >= 2 for region in entry.regions)
    return is_matrix and not any(BIAS_OR_NORM.search(name.lower()) for name in names)


def bent(x: Tensor, scale: float, cap: float | None) -> Tensor:
    """Logits from the head's product: scaled, then limited to cap * tanh(x / cap)."""
    return limited(x if scale == 1.0 else x * scale, cap)


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    return tensor


class LanguageModel(nn.Module):
    """A language model without the head's product: the caller computes the T x V logits.

    `forward(ids_T, positions_T, attend, routes)` returns hidden_TD.
    """

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.dims = dims
        self.has_lm_head = False
        self.is_from_tower = False
        """Whether a model with a value head starts from the text tower of a multimodal folder."""
        self.is_last = True
        """Whether the output is after the final norm, unlike that of earlier pipeline stages."""
        self.value_head: nn.Linear | None = None
        self.logit_scale = 1.0
        """Logits are the head's product times this..."""
        self.logit_cap: float | None = None
        """...limited to cap * tanh(x / cap), before the temperature."""
        self.cache_shapes: tuple[tuple[int, int], ...] = ()
        """(kv heads, width) of each call of the attention core, in order, if calls do not pass
        their layer; empty if they do."""
        self.packs_rows = True
        """Whether a pass can compute several rows; else each row has a microbatch of its own."""
        self.state_kinds: tuple[StateKind, ...] = ()
        """States that `advance` takes and returns; empty if it is not supported."""
        self.batches_tokens = True
        """Whether `advance` takes single tokens of several rows; else of one."""
        self.continues_runs = True
        """Whether `advance` takes states with several tokens of a row; else with one."""
        self.present: Callable[[str, Tensor], Tensor] = as_it_is
        """Converts a parameter to its global form; in a layout, to a DTensor."""
        self.adapter_map: WeightMap | None = None
        """The factors beside frozen weights, by their native names (`models.lora`)."""

    @property
    def blocks(self) -> Mapping[int, nn.Module]:
        """The layers on this rank."""
        raise NotImplementedError

    @property
    def weight_map(self) -> WeightMap:
        """The tensors by their names in this model, as regions of HF-on-disk tensors."""
        raise NotImplementedError

    @property
    def trained_map(self) -> WeightMap:
        """The map of trained, published and saved weights: the factors, if there are any."""
        return self.weight_map if self.adapter_map is None else self.adapter_map

    def lora_words(self, lora: LoraConfig) -> Sequence[str]:
        """The targets of an adapter as words; UserError if the model has no such matrices."""
        raise NotImplementedError

    def lora_map(self, lora: LoraConfig) -> WeightMap:
        """The map of an adapter's factors, by their names in this model; for a critic with its
        head."""
        raise NotImplementedError

    @property
    def hf_classes(self) -> tuple[str, str]:
        """transformers' classes for the causal model and for the one with a scalar head."""
        raise NotImplementedError

    @property
    def saved_config(self) -> Mapping[str, Any]:
        """Keys of the saved config that replace those of the original one."""
        return {}

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head [V, D]; the embedding itself if they are tied."""
        raise NotImplementedError

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, V], for tests; training fuses the head with the log-probs."""
        return bent(F.linear(hidden_TD, self.head_weight), self.logit_scale, self.logit_cap)

    @property
    def cache_dims(self) -> ModelDims:
        """The dimensions with the layers, heads and widths that a sampler's cache needs."""
        if not self.cache_shapes:
            return self.dims
        own = tuple(
            {"num_kv_heads": heads, "head_dim": width} for heads, width in self.cache_shapes
        )
        return replace(self.dims, num_layers=len(own), own=own)

    @property
    def tables(self) -> set[str]:
        """Names of parameters that are lookup tables."""
        tables = [name for name, x in self.named_modules() if isinstance(x, nn.Embedding)]
        return {f"{name}.weight" for name in tables}

    @property
    def decayed(self) -> set[str]:
        """Names of parameters with weight decay: matrices, but no tables, biases or norms. The kind
        is that of the tensors on disk, because joined gate and up biases have two dims here."""
        return {
            name for name, entry in self.trained_map.entries.items() if _is_decayed(entry)
        } - self.tables

    def advance(
        self,
        ids_ST: Tensor,
        positions_ST: Tensor,
        attend: Attend,
        states: Sequence[Tensor] | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Computes T further tokens of each of S rows; returns hidden_STD and the states after
        them. `states`: one tensor of each kind with the rows as first dim, which may be
        overwritten; None if the rows begin."""
        raise NotImplementedError

    def map_for(self, names: Iterable[str]) -> WeightMap:
        """The weight map for a folder with these tensors, without redundant ones."""
        return self.weight_map

    def fill_tables(self) -> None:
        """Computes tables (rotary frequencies) once the model has memory."""

    def draw(self, name: str, seed: int) -> Tensor | None:
        """Initialises a weight from seed and name, unsharded; None: use the init of the weight
        map."""
        return None

    def values(self, hidden_TD: Tensor) -> Tensor:
        """Values [T] in float32, of which a reward model's reward is the last."""
        assert self.value_head is not None, "this model is built without a value head"
        return self.value_head(hidden_TD).squeeze(-1).float()


class FamilyModel(LanguageModel):
    """A model with a model file, which has the class names for saved folders."""

    @property
    def hf_classes(self) -> tuple[str, str]:
        return spec_of(self.dims.family).classes

    @property
    def saved_config(self) -> Mapping[str, Any]:
        return spec_of(self.dims.family).saved_config

    def map_for(self, names: Iterable[str]) -> WeightMap:
        """A model with a value head has the names of a language model, and may start from the text
        tower of a multimodal folder."""
        found = spelling_of({*names}) if self.is_from_tower else None
        return map_of(replace(self.dims, tower_names=found)) if found else self.weight_map

    def lora_words(self, lora: LoraConfig) -> Sequence[str]:
        return lora_words(self.dims, lora)

    def lora_map(self, lora: LoraConfig) -> WeightMap:
        return lora_map_of(self.dims, lora, value_head=self.value_head is not None)
