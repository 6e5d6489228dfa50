"""A model's weights under their HF-on-disk names: out by iteration, in by exact installation.

Parameters may be plain tensors or DTensors of any layout; a model may be one pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pentad.models.decoder import Decoder
from pentad.models.families import map_of
from pentad.weights import flow
from pentad.weights.flow import Pairs, Shard, TensorInfo
from pentad.weights.regions import Box, full_box

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into parameter names."""


def native_tensors(model: Decoder) -> dict[str, Tensor]:
    """The model's parameters by their native names."""
    out: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        out[name] = parameter
    return out


def native_shards(model: Decoder) -> dict[str, Shard]:
    """Each parameter's local memory with the box of the global tensor that it holds."""
    tensors = native_tensors(model)
    return {name: Shard(_local(tensor), box_of(tensor)) for name, tensor in tensors.items()}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box_of(tensor: Tensor) -> Box:
    """Which part of the global tensor lies here."""
    if not isinstance(tensor, DTensor):
        return full_box(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def hf_metadata(model: Decoder, dtype: torch.dtype | None = None) -> dict[str, TensorInfo]:
    """Name, shape and dtype of everything `iter_hf` yields, in its order, without reading it."""
    tensors = native_tensors(model)
    return {
        source.name: TensorInfo(source.shape, dtype or tensors[source.regions[0].source].dtype)
        for source in flow.held_sources(tensors, map_of(model.dims))
    }


def iter_hf(model: Decoder, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(HF-on-disk name, whole tensor) in layer order; a view of the parameter where possible.

    Sharded parameters are gathered one at a time, so every rank must iterate to the end.
    """
    return flow.iter_sources(native_tensors(model), map_of(model.dims), dtype, gather=_gather)


def _gather(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def install_hf(
    model: Decoder,
    pairs: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, TensorInfo] | None = None,
) -> int:
    """Overwrites all weights in place; every tensor exactly once. Returns how many were taken.

    A sequence, or an iterator whose `metadata` is given, is refused before anything is written;
    a bare iterator is checked tensor by tensor and, at its end, for what is missing.
    """
    if isinstance(pairs, Sequence):
        return flow.fill(native_shards(model), map_of(model.dims), Pairs(pairs))
    return flow.install(native_shards(model), map_of(model.dims), pairs, metadata)
