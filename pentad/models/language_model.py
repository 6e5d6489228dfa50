"""What engines ask of a model: `LanguageModel`, of which there are two kinds.

`decoder.Decoder` is composed from a model file, `hf.module.HfModel` is a model of transformers.
Both take flat tokens with their positions and the attention core to use, and know no ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from pentad.core.dims import ModelDims
from pentad.models.families import spec_of
from pentad.weights.map import Entry, WeightMap

BIAS_OR_NORM = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters that transformers' Trainer does not decay."""


def _is_decayed(entry: Entry) -> bool:
    names = [entry.name, *(region.source for region in entry.regions)]
    is_matrix = all(len(region.source_shape) >= 2 for region in entry.regions)
    return is_matrix and not any(BIAS_OR_NORM.search(name.lower()) for name in names)


def as_it_is(name: str, tensor: Tensor) -> Tensor:
    return tensor


class LanguageModel(nn.Module):
    """A language model without its softmax: the T x V logits are the caller's business.

    Called with (ids_T, positions_T, attend, routes) it gives hidden_TD.
    """

    def __init__(self, dims: ModelDims) -> None:
        super().__init__()
        self.dims = dims
        self.has_lm_head = False
        self.is_last = True
        """Whether the output is after the final norm; a pipeline stage's may be before it."""
        self.value_head: nn.Linear | None = None
        self.logit_scale = 1.0
        """Logits are the head's product times this..."""
        self.logit_cap: float | None = None
        """...bent to cap * tanh(x / cap), before the temperature."""
        self.present: Callable[[str, Tensor], Tensor] = as_it_is
        """How a parameter shows to the outside; under a layout, as a DTensor of the whole."""
        self.adapter_map: WeightMap | None = None
        """The factors beside frozen weights, by their native names (`models.lora`)."""

    @property
    def blocks(self) -> Mapping[int, nn.Module]:
        """The layers held here."""
        raise NotImplementedError

    @property
    def weight_map(self) -> WeightMap:
        """The tensors by their names in this model, as regions of HF-on-disk tensors."""
        raise NotImplementedError

    @property
    def trained_map(self) -> WeightMap:
        """The map of what is trained, published and saved: the factors, where there are any."""
        return self.weight_map if self.adapter_map is None else self.adapter_map

    @property
    def hf_classes(self) -> tuple[str, str]:
        """transformers' classes for the causal model and for the one with a scalar head."""
        raise NotImplementedError

    @property
    def saved_config(self) -> Mapping[str, Any]:
        """What the config of a saved folder says instead of the config it came with."""
        return {}

    @property
    def head_weight(self) -> Tensor:
        """[V, D]; the embedding itself where the two are tied."""
        raise NotImplementedError

    @property
    def tables(self) -> set[str]:
        """Parameters that are looked up by token."""
        tables = [name for name, x in self.named_modules() if isinstance(x, nn.Embedding)]
        return {f"{name}.weight" for name in tables}

    @property
    def decayed(self) -> set[str]:
        """Parameters that weight decay applies to: matrices that are no table, bias or norm. What
        a parameter is, its tensors on disk say: here gate and up biases are a matrix, too."""
        return {
            name for name, entry in self.trained_map.entries.items() if _is_decayed(entry)
        } - self.tables

    def map_for(self, names: Iterable[str]) -> WeightMap:
        """The weight map, with those of a folder's names left out that carry nothing."""
        return self.weight_map

    def fill_tables(self) -> None:
        """Computes what is no weight (rotary frequencies), once the model has memory."""

    def draw(self, name: str, seed: int) -> Tensor | None:
        """A fresh weight, whole, by the seed and its name; None: as the weight map says."""
        return None

    def values(self, hidden_TD: Tensor) -> Tensor:
        """[T] in float32: the value of each token, or the reward read at the last one."""
        assert self.value_head is not None, "this model is built without a value head"
        return self.value_head(hidden_TD).squeeze(-1).float()


class FamilyModel(LanguageModel):
    """A model of a family that has a model file, which says what its saved folders are called."""

    @property
    def hf_classes(self) -> tuple[str, str]:
        return spec_of(self.dims.family).classes

    @property
    def saved_config(self) -> Mapping[str, Any]:
        return spec_of(self.dims.family).saved_config
