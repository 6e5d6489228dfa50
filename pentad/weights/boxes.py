"""Computes the box (block of a global tensor) that is on this rank from mesh and placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pentad.core.fit import expert_range
from pentad.weights.cuts import cut_range
from pentad.weights.regions import Box, Shape, full_box

if TYPE_CHECKING:  # imported for types only: it takes a second, and samplers have no DTensors
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from pentad.weights.parts import AnyPlacement, PartTensor


def as_spread(tensor: Tensor) -> DTensor | PartTensor | None:
    """The tensor if it is sharded (DTensor or PartTensor), else None."""
    if type(tensor) in (Tensor, nn.Parameter):
        return None
    from torch.distributed.tensor import DTensor

    from pentad.weights.parts import PartTensor

    return tensor if isinstance(tensor, DTensor | PartTensor) else None


def box_of(tensor: Tensor) -> Box:
    """The box of the global tensor that is on this rank."""
    spread = as_spread(tensor)
    if spread is None:
        return full_box(tensor.shape)
    return placed_box(tuple(tensor.shape), spread.device_mesh, spread.placements)


def placed_box(shape: Shape, mesh: DeviceMesh, placements: Sequence[AnyPlacement]) -> Box:
    """The box of a tensor of that shape on this rank, for these placements."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is not part of the tensor's mesh"
    cuts = list(zip(placements, mesh.shape, coordinate, strict=True))
    return tuple(rows_of(size, dim, cuts) for dim, size in enumerate(shape))


def rows_of(size: int, dim: int, cuts: Sequence[tuple[AnyPlacement, int, int]]) -> tuple[int, int]:
    """Range of one dim after applying (placement, number of ranks, rank) of each mesh dim.

    FSDP over tensor parallelism uses a strided shard, but the rows are contiguous.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from pentad.weights.parts import BalancedShard

    rows = torch.arange(size)
    for placement, num, rank in cuts:
        if isinstance(placement, BalancedShard):
            if placement.dim == dim:
                start, stop = expert_range(len(rows), num, rank)
                rows = rows[start:stop]
        elif isinstance(placement, _StridedShard) and placement.dim == dim:
            parts = [_chunk(part, num, rank) for part in rows.chunk(int(placement.split_factor))]
            rows = torch.cat(parts)
        elif isinstance(placement, Shard) and placement.dim == dim:
            rows = _chunk(rows, num, rank)
        else:
            assert not placement.is_partial(), "a partial sum is no weight"
    if len(rows) == 0:
        return 0, 0
    start, stop = int(rows[0]), int(rows[-1]) + 1
    assert stop - start == len(rows), f"{cuts} scatter the rows of dim {dim}"
    return start, stop


def _chunk(rows: Tensor, num: int, rank: int) -> Tensor:
    start, stop = cut_range(len(rows), num, rank)
    return rows[start:stop]
