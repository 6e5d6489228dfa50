"""Saves state as a DCP folder that any layout and stock torch can read: plans which rank writes
which blocks, and writes them.

The plan is made once, by DCP's planner. A rank's file consists of the bytes that `torch.save`
writes around each tensor, and the tensor's bytes, staged in host memory or read when written.
"""

from __future__ import annotations

import io
import json
import logging
import math
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from pentad.checkpoint.folders import info_folder, step_of
from pentad.checkpoint.job import (
    FileSegment,
    FileSpec,
    Lazy,
    Piece,
    Span,
    WriteJob,
)
from pentad.checkpoint.rank_saver import RankSaver
from pentad.checkpoint.writer import Pending, Writer
from pentad.core.errors import RunError
from pentad.ops.capture import wait_for_device
from pentad.parallel.cuts import local
from pentad.weights.dcp import frame_of
from pentad.weights.files import memory_of
from pentad.weights.megatron.layout import INDEX
from pentad.weights.regions import Box, Shape, box_shape, show

log = logging.getLogger(__name__)

ALIGN = 64
"""Alignment of tensors: a multiple of every item size."""


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@torch.no_grad()
def copy_to(memory: Tensor, tensors: Iterable[tuple[int, Tensor]]) -> None:
    """Copies each (start, tensor) into the memory; the tensors may change after it returns."""
    devices = set()
    for start, tensor in tensors:
        room = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            devices.add(tensor.device)
    for device in devices:
        wait_for_device(device)


COUNTERS = "counters.json"
PIECE_BYTES = 32 << 20
"""Bytes of a tensor with one digest; readers read whole pieces."""


class Stateful(Protocol):
    """A learner whose state is saved and restored; `engine.engine.Engine`."""

    def state_tensors(self) -> dict[str, Tensor]: ...

    def state_counters(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Item:
    """A block of a tensor that this rank writes."""

    name: str
    box: Box
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(box_shape(self.box)) * self.dtype.itemsize

    @property
    def shape(self) -> Shape:
        return box_shape(self.box)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The items that this rank writes; on rank 0 also the index of all items."""

    items: tuple[Item, ...]
    index: bytes | None

    @property
    def staged_bytes(self) -> int:
        return sum(aligned(item.size_bytes) for item in self.items)


class StateSaver(RankSaver):
    """Saves the state of one learner on one rank; all ranks make the same calls. At most one save
    is in progress."""

    def __init__(self, writer: Writer | None = None) -> None:
        super().__init__(writer)
        self._plan: ShardPlan | None = None
        self._planned: list[tuple[Any, ...]] = []

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Plans, and starts to allocate the memory of an asynchronous save."""
        pins = any(local(tensor).is_cuda for tensor in tensors.values())
        self.memory.prepare(self._plan_for(tensors).staged_bytes, pins=pins)

    def save(
        self,
        tensors: Mapping[str, Tensor],
        root: Path,
        folder: str,
        *,
        is_async: bool,
        counters: Mapping[str, Any] | None = None,
        generation: int | None = None,
    ) -> Pending:
        """Saves the state, which may change after it returns. A write error is stored in the
        pending result, so that all ranks return; `outcomes` has the errors of all. `counters` are
        written beside the tensors; `generation` is the learners' (`checkpoint.fence`)."""
        self.finish()
        plan = self._plan_for(tensors)
        step = step_of(Path(folder).name)
        assert step is not None, f"{folder} is not of a step"
        parts = [local(tensors[item.name]).detach() for item in plan.items]
        for item, part in zip(plan.items, parts, strict=True):
            assert tuple(part.shape) == item.shape, f"{item.name}: planned as {item.shape}"

        def make_job() -> WriteJob:
            lazily = partial(_lazily, _Bounce())
            give = self._stage(plan, parts) if is_async else lazily
            files = self._files(plan, parts, folder, give, counters)
            return WriteJob(Path(root), info_folder(step), files, generation)

        return self.begin(make_job, is_async=is_async)

    def _plan_for(self, tensors: Mapping[str, Tensor]) -> ShardPlan:
        described = [(n, t.shape, t.dtype, local(t).shape) for n, t in tensors.items()]
        if self._plan is None or described != self._planned:
            self._plan = plan_shards(tensors, self.group)
            self._planned = described
        return self._plan

    def _stage(self, plan: ShardPlan, parts: Sequence[Tensor]) -> Give:
        """Copies all parts to host memory; returns a function that locates an item's bytes."""
        memory = self.memory.take(plan.staged_bytes, pins=any(part.is_cuda for part in parts))
        starts: dict[int, int] = {}
        end = 0
        for number, part in enumerate(parts):
            starts[number] = end
            end += aligned(part.nbytes)
        copy_to(self.memory.bytes, ((starts[n], part) for n, part in enumerate(parts)))
        return lambda number, part, start, stop: Span(memory, starts[number] + start, stop - start)

    def _files(
        self,
        plan: ShardPlan,
        parts: Sequence[Tensor],
        folder: str,
        give: Give,
        counters: Mapping[str, Any] | None,
    ) -> tuple[FileSpec, ...]:
        pieces = [
            piece
            for number, (item, part) in enumerate(zip(plan.items, parts, strict=True))
            for piece in _pieces(item, partial(give, number, part))
        ]
        files = [FileSpec(f"{folder}/{file_name(self.rank)}", tuple(pieces))] if pieces else []
        if plan.index is not None:
            files.append(FileSpec(f"{folder}/{INDEX}", (Piece("index", (plan.index,)),)))
            if counters is not None:
                text = json.dumps(counters, indent=1, sort_keys=True).encode()
                files.append(FileSpec(f"{folder}/{COUNTERS}", (Piece("counters", (text,)),)))
        return tuple(files)


Give = Callable[[int, Tensor, int, int], FileSegment]
"""Function (item number, tensor, start, stop) -> that range of the tensor's bytes."""


def file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def plan_shards(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> ShardPlan:
    """Assigns every block of every tensor to one of the ranks that hold it, for writing."""
    # With fewer rows than ranks, some ranks hold no part of a tensor.
    held = {n: t for n, t in tensors.items() if local(t).numel() or not t.numel()}
    rank = 0 if group is None else dist.get_rank(group)
    planner = DefaultSavePlanner()
    planner.set_up_planner(held, is_coordinator=rank == 0)
    own = planner.create_local_plan()
    if group is None:
        (plan,), metadata = planner.create_global_plan([own])
        return ShardPlan(_items(plan), _index([plan], metadata))
    world = dist.get_world_size(group)
    plans: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(own, plans, dst=0, group=group)
    answers: list[Any] = [None] * world
    index = None
    if plans is not None:
        try:
            decided, metadata = planner.create_global_plan(plans)
            index = _index(decided, metadata)
            answers = [(plan, "") for plan in decided]
        except Exception as error:  # raised on all ranks, which wait
            answers = [(None, f"{type(error).__name__}: {error}")] * world
    given: list[Any] = [None]
    dist.scatter_object_list(given, answers if rank == 0 else None, src=0, group=group)
    plan, failure = given[0]
    if failure:
        raise RunError(f"the ranks' parts of the state do not fit together ({failure})")
    return ShardPlan(_items(plan), index)


def _items(plan: SavePlan) -> tuple[Item, ...]:
    return tuple(map(_item, plan.items))


def _item(write: WriteItem) -> Item:
    assert write.tensor_data is not None, f"{write.index.fqn} is no tensor"
    chunk = write.tensor_data.chunk
    ends = zip(chunk.offsets, chunk.sizes, strict=True)
    box = tuple((start, start + size) for start, size in ends)
    return Item(write.index.fqn, box, write.tensor_data.properties.dtype)


def _index(plans: Sequence[SavePlan], metadata: Metadata) -> bytes:
    """`.metadata`: the file and position of each block, as in stock DCP."""
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for rank, plan in enumerate(plans):
        start = 0
        for write in plan.items:
            item = _item(write)
            length = item.size_bytes + frame_of(item.dtype, item.shape).size_bytes
            storage[write.index] = _StorageInfo(file_name(rank), start, length)
            start += length
    out = io.BytesIO()
    pickle.dump(replace(metadata, storage_data=storage, storage_meta=StorageMeta()), out)
    return out.getvalue()


def _pieces(item: Item, give: Callable[[int, int], FileSegment]) -> Iterator[Piece]:
    frame, size = frame_of(item.dtype, item.shape), item.size_bytes
    starts = range(0, max(size, 1), PIECE_BYTES)
    for start in starts:
        stop = min(start + PIECE_BYTES, size)
        segments: list[FileSegment] = [frame.before] if start == 0 else []
        if size:
            segments.append(give(start, stop))
        if stop == size:
            segments.append(frame.after)
        part = f" part {start // PIECE_BYTES + 1} of {len(starts)}" if len(starts) > 1 else ""
        yield Piece(f"{item.name} {show(item.box)}{part}", tuple(segments))


class _Bounce(threading.local):
    """Host buffer of a writing thread, for one segment at a time between GPU and disk."""

    memory: Tensor | None = None

    def take(self, part: Tensor) -> Tensor:
        if part.device.type == "cpu":
            return part
        with torch.cuda.device(part.device):
            if self.memory is None:
                self.memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            return self.memory[: part.numel()].copy_(part)


def _lazily(bounce: _Bounce, number: int, part: Tensor, start: int, stop: int) -> FileSegment:
    def produce() -> memoryview:
        flat = part.contiguous().view(-1).view(torch.uint8)
        return memory_of(bounce.take(flat[start:stop]))

    return Lazy(stop - start, produce)
