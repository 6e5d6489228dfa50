"""What a model file declares: `ModelSpec`, all data, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pentad.core.dims import ModelDims
from pentad.core.seams import Seam
from pentad.models.columns import DECODER, MEGATRON, is_dense, megatron_sizes
from pentad.models.config_reader import dims_from_hf
from pentad.weights.map import Rule, WeightMap, build_map, through

DECODER_SEAMS = (
    Seam("embed", "lookup"),
    Seam("layers.{i}.attn", "gather"),
    Seam("layers.{i}.attn.o", "scatter"),
    Seam("layers.{i}.ffn", "gather", is_dense),
    Seam("layers.{i}.ffn.down", "scatter", is_dense),
)
"""Of `decoder.Decoder`. A mixture has none: its router and experts take each rank's own tokens."""
DECODER_PLAN = {"V": "tp", "Q": "tp", "K": "tp", "F": "tp", "E": "ep", "M": "etp"}


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
    """Where tensor parallelism gathers and deals tokens."""
    read_dims: Callable[[Mapping[str, Any]], ModelDims] = dims_from_hf
    """The config adapter: the dimensions from a HF config."""
    public: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Public models by name, with what of their config.json counts: a run can be planned with
    them before any download (see `sizes`)."""
    model: str = "pentad.models.decoder:Decoder"
    """The composition: class that is built from the dimensions, as module:name."""
    classes: tuple[str, str] = ("", "")
    """transformers' classes for the causal model and for the one with a scalar head."""
    megatron: tuple[Rule, ...] = MEGATRON
    """Megatron's tensors as regions of the native ones."""
    ignored: tuple[str, ...] = ()
    """HF-on-disk names that some folders hold and that the model has no use for: {i} for a layer,
    {n} for a layer behind the last that predicts further tokens, * at the end for any rest."""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Switches that only this family's config has, by a name for each: `verify-model` tries them
    beside those of all families."""
    saved_config: Mapping[str, Any] = field(default_factory=dict)
    """What the config.json of a saved folder says instead, where the folder holds less."""

    def weight_map(self, dims: ModelDims) -> WeightMap:
        return build_map(self.rules, dims, ignored=self.ignored)

    def megatron_map(self, dims: ModelDims, vocab_rows: int) -> WeightMap:
        """Megatron's tensors, with so many rows of vocabulary, as regions of HF-on-disk ones."""
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
