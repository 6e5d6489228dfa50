"""What a model file declares: `ModelSpec`, all data, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pentad.core.dims import ModelDims, dims_from_hf
from pentad.core.seams import Seam
from pentad.models.columns import MEGATRON, megatron_sizes
from pentad.weights.map import Rule, WeightMap, build_map, through


def is_dense(dims: ModelDims, layer: int) -> bool:
    return not dims.is_moe(layer)


DECODER_SEAMS = (
    Seam("embed", "lookup"),
    Seam("layers.{i}.attn", "gather"),
    Seam("layers.{i}.attn.o", "scatter"),
    Seam("layers.{i}.ffn", "gather", is_dense),
    Seam("layers.{i}.ffn.down", "scatter", is_dense),
)
"""Of `decoder.Decoder`. A mixture has none: its router and experts take each rank's own tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model family. A module that holds one as SPEC is a model file."""

    family: str
    """HF `model_type`."""
    rules: tuple[Rule, ...]
    """The weight map: native tensors as regions of HF-on-disk tensors."""
    plan: Mapping[str, str]
    """The parallel plan: size symbol -> mesh axis that splits every dim of that symbol."""
    seams: tuple[Seam, ...] = DECODER_SEAMS
    """Where tensor parallelism gathers and deals tokens."""
    read_dims: Callable[[Mapping[str, Any]], ModelDims] = dims_from_hf
    """The config adapter: the dimensions from a HF config."""
    model: str = "pentad.models.decoder:Decoder"
    """The composition: class that is built from the dimensions, as module:name."""
    classes: tuple[str, str] = ("", "")
    """transformers' classes for the causal model and for the one with a scalar head."""
    megatron: tuple[Rule, ...] = MEGATRON
    """Megatron's tensors as regions of the native ones."""
    ignored: tuple[str, ...] = ()
    """HF-on-disk names that some folders hold and that the model has no use for: {i} for a layer,
    {n} for a layer behind the last that predicts further tokens, * at the end for any rest."""
    saved_config: Mapping[str, Any] = field(default_factory=dict)
    """What the config.json of a saved folder says instead, where the folder holds less."""

    def weight_map(self, dims: ModelDims) -> WeightMap:
        return build_map(self.rules, dims, ignored=self.ignored)

    def megatron_map(self, dims: ModelDims, vocab_rows: int) -> WeightMap:
        """Megatron's tensors, with so many rows of vocabulary, as regions of HF-on-disk ones."""
        sizes = megatron_sizes(dims, vocab_rows)
        column = build_map(self.megatron, dims, extra_sizes=sizes)
        return through(column, self.weight_map(dims))
