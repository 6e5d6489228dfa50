"""An engine's tensors as state to be saved: whole tensors outside, this rank's memory inside."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pentad.engine.optim import check_named
from pentad.parallel.cuts import Cut

Cuts = Mapping[str, Cut]


def present_all(tensors: Mapping[str, Tensor], cuts: Cuts) -> dict[str, Tensor]:
    """Each as the tensor it is a part of, sharing memory: a DTensor under a layout."""
    return {
        name: cuts[name].present(tensor.detach())
        if _is_cut(name, tensor, cuts)
        else tensor.detach()
        for name, tensor in tensors.items()
    }


def take_all(
    saved: Mapping[str, Tensor], present: Mapping[str, Tensor], cuts: Cuts, what: str
) -> dict[str, Tensor]:
    """Of saved whole tensors what belongs into the present memory; refuses what does not fit."""
    check_named(present_all(present, cuts), saved, what)
    return {
        name: cuts[name].take(name, saved[name]) if _is_cut(name, tensor, cuts) else saved[name]
        for name, tensor in present.items()
    }


def _is_cut(name: str, tensor: Tensor, cuts: Cuts) -> bool:
    """Parameters and what has their shape; not the optimizer's step counts, nor buffers."""
    return name in cuts and tensor.ndim == len(cuts[name].shape)
