"""Low-rank adapters as files: what an adapter is, under the names of Hugging Face modules.

An adapter adds `alpha / rank * B A` to the weight of a linear module. Its factors are named
`<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank], where `<module>` is
the name in the base's safetensors files, such as `model.layers.3.self_attn.q_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

A, B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Which modules have factors, and of which size."""

    rank: int
    alpha: float
    """The product B A is scaled by alpha / rank."""
    targets: tuple[str, ...]
    """Sorted words of the recipe: q k v o gate up down experts head."""
    experts: Literal["shared_outer", "each"] = "each"
    """Whether the experts of a layer share the factor on the side of the hidden dimension."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class Adapter:
    """The factors of every adapted module; a factor that experts share is there under the name of
    each of them, as the same tensor."""

    spec: LoraSpec
    factors: Mapping[str, Tensor]
