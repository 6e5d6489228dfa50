"""Iterates over a model's weights by HF-on-disk name, and installs new weights.

Parameters may be plain tensors or parts of any layout (DTensor, PartTensor); a model may be one
pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from pentad.models.language_model import LanguageModel
from pentad.weights import transfer
from pentad.weights.boxes import as_spread, box_of, rows_of
from pentad.weights.map import WeightMap
from pentad.weights.transfer import PairsReader, TensorInfo

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes of torch.compile and activation checkpointing in parameter names."""


def native_tensors(model: LanguageModel, weight_map: WeightMap | None = None) -> dict[str, Tensor]:
    """The model's weights by native name, in global form: those in `weight_map`, by default the
    model's map without factors."""
    out: dict[str, Tensor] = {}
    is_adapter = weight_map is not None and weight_map is model.adapter_map
    factors = () if model.adapter_map is None else model.adapter_map.entries
    for name, parameter in model.named_parameters():
        if (_native(name) in factors) == is_adapter:
            out[_native(name)] = model.present(_native(name), parameter)
    if is_adapter:
        return out
    return out | {_native(name): buffer for name, buffer in kept_buffers(model).items()}


def kept_buffers(model: LanguageModel) -> dict[str, Tensor]:
    """Buffers that are weights (saved and loaded), unlike computed tables."""
    entries = model.weight_map.entries
    return {name: x for name, x in model.named_buffers() if _native(name) in entries}


def _native(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def native_shards(
    model: LanguageModel, weight_map: WeightMap | None = None
) -> dict[str, transfer.Shard]:
    """Local memory of each parameter, with its box of the global tensor."""
    tensors = native_tensors(model, weight_map)
    return {
        name: transfer.Shard(_local(tensor), box_of(tensor)) for name, tensor in tensors.items()
    }


def _local(tensor: Tensor) -> Tensor:
    spread = as_spread(tensor)
    return tensor if spread is None else spread.to_local()


def hf_metadata(
    model: LanguageModel, dtype: torch.dtype | None = None, weight_map: WeightMap | None = None
) -> dict[str, TensorInfo]:
    """Name, shape and dtype of all tensors of `iter_hf`, in its order, without reading them."""
    tensors = native_tensors(model, weight_map)
    return {
        source.name: TensorInfo(
            source.shape,
            transfer.written_dtype(source, dtype) or tensors[source.regions[0].source].dtype,
        )
        for source in transfer.held_sources(tensors, weight_map or model.weight_map)
    }


def iter_hf(
    model: LanguageModel, dtype: torch.dtype | None = None, weight_map: WeightMap | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF-on-disk name, unsharded tensor) in layer order, as views if possible.
    `weight_map`: of the model, or of its factors.

    Sharded parameters are gathered one at a time, so every rank must iterate to the end.
    """
    tensors = native_tensors(model, weight_map)
    return transfer.iter_sources(
        tensors, weight_map or model.weight_map, dtype, gather=gather_whole
    )


def gather_whole(tensor: Tensor) -> Tensor:
    """Returns the unsharded tensor on every rank that holds a part; all of them must call it. Does
    not use DTensor's redistribution, which caches process groups that may no longer exist."""
    spread = as_spread(tensor)
    if spread is None:
        return tensor
    from torch.distributed.tensor import Shard

    from pentad.weights.parts import BalancedShard

    mesh, whole = spread.device_mesh, spread.to_local()
    at = mesh.get_coordinate()
    assert at is not None, "this rank is not part of the tensor's mesh"
    cuts = list(zip(spread.placements, mesh.shape, at, strict=True))
    for axis in reversed(range(mesh.ndim)):
        placement, num, _ = cuts[axis]
        if num > 1 and isinstance(placement, Shard | BalancedShard):
            dim, size = placement.dim, tensor.shape[placement.dim]
            ends = [
                rows_of(size, dim, [*cuts[:axis], (placement, num, rank)]) for rank in range(num)
            ]
            lengths = [stop - start for start, stop in ends]
            rows = whole.movedim(dim, 0).to(mesh.device_type)  # offloaded parts are on the host
            whole = _gather_rows(rows, lengths, mesh.get_group(axis))
            whole = whole.movedim(0, dim)
    return whole


def _gather_rows(part: Tensor, lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """Gathers the rows of all ranks, lengths[r] from rank r."""
    longest = max(lengths)
    padded = part.new_zeros(longest, *part.shape[1:])
    padded[: len(part)] = part
    out = part.new_empty(len(lengths) * longest, *part.shape[1:])
    dist.all_gather_into_tensor(out, padded, group=group)
    if min(lengths) == longest:
        return out
    return torch.cat([x[:n] for x, n in zip(out.split(longest), lengths, strict=True)])


def install_hf(model: LanguageModel, pairs: Iterable[tuple[str, Tensor]]) -> int:
    """Overwrites all weights in place (with an adapter: only the factors) and returns their number.
    `pairs` must have every tensor exactly once.

    All are kept in memory until the end; invalid ones are rejected before any is written.
    """
    weight_map = model.trained_map
    return transfer.fill(native_shards(model, weight_map), weight_map, PairsReader(pairs))
