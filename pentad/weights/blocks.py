"""Plans which blocks of HF tensors each rank writes, reads these blocks from its shards, and joins
them to whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.group_values import OptionalGroup, gather_values
from pentad.core.sizes import PUBLISH_BUCKET_BYTES
from pentad.weights.map import WeightMap
from pentad.weights.regions import (
    Box,
    Lookup,
    Region,
    box_shape,
    clip_all,
    coverage_fault,
    slices,
    within,
)
from pentad.weights.transfer import (
    Shard,
    TensorInfo,
    assemble,
    held_sources,
    source_block,
    target_block,
)

ALIGN = 64
"""Alignment in bytes of a block in host memory."""


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """A block of a HF tensor whose elements are in one shard of this rank."""

    shard: str
    part: tuple[slice, ...]
    """Slices of the shard's memory."""
    region: Region
    """Region with the HF tensor as source and `part` as target."""
    dtype: torch.dtype
    """The dtype of the HF tensor."""
    offset: int
    """Offset in the staging memory."""

    @property
    def name(self) -> str:
        return self.region.source

    @property
    def box(self) -> Box:
        return self.region.source_box

    @property
    def size_bytes(self) -> int:
        return math.prod(box_shape(self.box)) * self.dtype.itemsize

    def source(self, shards: Mapping[str, Shard]) -> Tensor:
        """View of the block in the shard, in the shard's order and dtype."""
        return target_block(shards[self.shard].tensor[self.part], self.region)

    def contiguous(self, shards: Mapping[str, Shard]) -> Tensor | None:
        """View of the block if the shard is in host memory with the order and dtype of the HF
        tensor, else None."""
        source = self.source(shards)
        dims = [run.source_dim for run in self.region.runs]
        is_same = source.dtype == self.dtype and dims == sorted(dims)
        return source if is_same and not source.is_cuda and source.is_contiguous() else None

    def view(self, memory: Tensor, offset: int | None = None) -> Tensor:
        """View of byte memory with the shape of the block, at `offset` or its own position."""
        start = self.offset if offset is None else offset
        room = memory[start : start + self.size_bytes]
        return room.view(self.dtype).view(box_shape(self.box))

    def copy_to(self, room: Tensor, shards: Mapping[str, Shard]) -> Tensor:
        """Copies the block to `room` in host memory; returns the cast block on the shard's
        device."""
        source = self.source(shards)
        piece = torch.empty_like(room, device=source.device) if source.is_cuda else room
        source_block(piece, self.region.alone).copy_(source)
        if piece is not room:
            room.copy_(piece, non_blocking=True)
        return piece


def plan_blocks(
    shards: Mapping[str, Shard],
    weight_map: WeightMap,
    infos: Mapping[str, TensorInfo],
    group: OptionalGroup,
) -> list[WeightBlock]:
    """Plans the blocks of `infos` that this rank writes. All ranks of the group call it; group None
    means a single rank. Raises RunError on all ranks unless every element is written once."""

    def gather(value: Any) -> list[Any]:
        return [value] if group is None else gather_values(value, group)

    rank = 0 if group is None else torch.distributed.get_rank(group)
    owners = owners_of(shards, weight_map, infos, gather)
    mine = {name: shards[name].box for name, owner in owners if owner == rank}
    return list(_blocks(mine, weight_map, infos))


def iter_whole(
    shards: Mapping[str, Shard],
    weight_map: WeightMap,
    infos: Mapping[str, TensorInfo],
    group: OptionalGroup,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors of `infos`: of a rank that has all weights as views if no copy is
    needed; else joined from the blocks of all ranks, which must iterate to the end, on `device`."""
    if group is None:
        tensors = {name: shard.tensor for name, shard in shards.items()}
        for source in held_sources(tensors, weight_map):
            yield source.name, assemble(source, tensors, infos[source.name].dtype)
        return
    mine: dict[str, list[WeightBlock]] = {name: [] for name in infos}
    for block in plan_blocks(shards, weight_map, infos, group):
        mine[block.name].append(block)
    for name, info in infos.items():
        whole = torch.zeros(info.shape, dtype=info.dtype, device=device)
        for block in mine[name]:
            block.copy_to(whole[slices(block.box)], shards)
        # The other ranks add zeros.
        torch.distributed.all_reduce(whole.view(-1).view(torch.uint8), group=group)
        yield name, whole


def staged_bytes(blocks: list[WeightBlock]) -> int:
    return blocks[-1].offset + blocks[-1].size_bytes if blocks else 0


def owners_of(
    shards: Mapping[str, Shard],
    weight_map: WeightMap,
    infos: Mapping[str, TensorInfo],
    gather: Callable[[Any], list[Any]],
) -> list[tuple[str, int]]:
    """Assigns each shard to the replica with the least to write; returns (shard, writer) pairs.
    Raises RunError unless every element of every tensor is written once."""
    entries = weight_map.entries
    mine = [
        [name, shard.box]
        for name, shard in shards.items()
        if math.prod(box_shape(shard.box)) and name in entries and not entries[name].is_copy
    ]
    holders: dict[tuple[str, Box], list[int]] = {}
    for rank, held in enumerate(gather(mine)):
        for name, box in held:
            key = name, tuple((start, stop) for start, stop in box)
            holders.setdefault(key, []).append(rank)
    load: dict[int, int] = {}
    owners: list[tuple[str, int]] = []
    boxes: dict[str, list[Box]] = {}
    for (name, box), ranks in holders.items():
        rank = min(ranks, key=lambda one: (load.get(one, 0), one))
        load[rank] = load.get(rank, 0) + math.prod(box_shape(box))
        owners.append((name, rank))
        boxes.setdefault(name, []).append(box)
    for info in infos:
        for region in weight_map.sources[info].regions:
            fault = coverage_fault(boxes.get(region.source, []), entries[region.source].shape)
            if fault:
                raise RunError(f"writing {info}: of {region.source} {fault}")
    return owners


def _blocks(
    mine: Mapping[str, Box], weight_map: WeightMap, infos: Mapping[str, TensorInfo]
) -> Iterator[WeightBlock]:
    end = 0
    for name, box in mine.items():
        near = Lookup(weight_map.entries[name].regions).near
        size = math.prod(box_shape(box)) * 4
        for part in _parts(box, -(-size // PUBLISH_BUCKET_BYTES)):
            for region in clip_all(near(part), part):
                if region.source not in infos:
                    continue
                dtype = infos[region.source].dtype
                block = WeightBlock(name, within(part, box), region, dtype, end)
                yield block
                end += block.size_bytes
                end += -end % ALIGN


def _parts(box: Box, num: int) -> list[Box]:
    """Splits a box into about `num` parts along its first dim if long enough (each part is then
    contiguous), else along its longest."""
    if num <= 1 or not box:
        return [box]
    lengths = [stop - start for start, stop in box]
    dim = 0 if lengths[0] >= 2 * num else lengths.index(max(lengths))
    start, stop = box[dim]
    step = -(-lengths[dim] // num)
    step += -step % 2  # even, so that 32-bit words of 16-bit numbers are not split
    ends = [(at, min(at + step, stop)) for at in range(start, stop, step)]
    return [(*box[:dim], one, *box[dim + 1 :]) for one in ends]
