"""Balanced sharding of a tensor over ranks: 8 experts over 5 ranks as 2, 2, 2, 1 and 1.

DTensor's `Shard` uses the sizes of torch.chunk (2, 2, 2, 2 and none), and DTensor operations assume
them. So balanced sharding has its own placement and tensor class, with the DTensor methods that
saving, restoring and gathering use, and without arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from pentad.weights.regions import Box, Shape, box_shape

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True, slots=True)
class BalancedShard:
    """A `Shard` placement whose part sizes differ by at most one, larger ones first."""

    dim: int


AnyPlacement = Placement | BalancedShard


class PartTensor(Tensor):
    """A rank's shard of a tensor; its shape is that of the whole tensor."""

    part: Tensor
    box: Box
    device_mesh: DeviceMesh
    placements: tuple[AnyPlacement, ...]

    @staticmethod
    def __new__(
        cls,
        part: Tensor,
        shape: Shape,
        box: Box,
        device_mesh: DeviceMesh,
        placements: Sequence[AnyPlacement],
    ) -> PartTensor:
        assert tuple(part.shape) == box_shape(box), f"{tuple(part.shape)} is not the shape of {box}"
        self: PartTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device
        )
        self.part, self.box = part, box
        self.device_mesh, self.placements = device_mesh, tuple(placements)
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartTensor({list(self.shape)}, box={self.box}, {self.part})"

    def to_local(self) -> Tensor:
        return self.part

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> PartTensor:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            given, *_ = args
            where = (tuple(given.shape), given.box, given.device_mesh, given.placements)
            return cls(func(given.part), *where)
        raise TypeError(f"{func}: a part of a tensor has no arithmetic; use its to_local()")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        """Write items for the planner of torch.distributed.checkpoint."""
        # Imported here: it takes a second, and other layouts do not need it.
        from torch.distributed.checkpoint import metadata
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        offsets = torch.Size([start for start, _ in self.box])
        data = TensorWriteData(
            chunk=metadata.ChunkStorageMetadata(offsets=offsets, sizes=self.part.shape),
            properties=metadata.TensorProperties.create_from_tensor(self.part),
            size=self.shape,
        )
        index = metadata.MetadataIndex(name, offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]
