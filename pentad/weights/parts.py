"""A tensor cut in balanced parts over ranks: 8 experts over 5 ranks as 2, 2, 2, 1 and 1.

DTensor's `Shard` cuts as torch.chunk does (2, 2, 2, 2 and none), and its operations rebuild their
results' placements as such. So a balanced cut has a placement and a tensor of its own, with what
saving, restoring and gathering use of a DTensor, and without arithmetic.
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
    """As `Shard`, but in parts whose sizes differ by at most one, the larger ones first."""

    dim: int


AnyPlacement = Placement | BalancedShard


class PartTensor(Tensor):
    """A rank's part of a whole tensor, with the whole's shape."""

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
        """What a planner of torch.distributed.checkpoint asks for."""
        # Here, since it takes a second that runs of other layouts do without.
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
