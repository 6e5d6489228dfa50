"""Tickets: where the weights of one version lie between processes, and how they are read there.

Kinds: `shm` (a file in shared memory), `file` (files in a folder that all machines see, one of each
rank that writes), `ipc` (one buffer on a GPU that both processes use). Reading gives whole tensors:
views where a tensor lies in one piece.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pentad.core.errors import InfraFailure, RunError
from pentad.core.roles import TensorPairs
from pentad.sync.group import gpu_handle, open_gpu_handle
from pentad.weights.regions import box_shape, coverage_fault, slices
from pentad.weights.transfer import TensorInfo

Kind = Literal["shm", "file", "ipc"]
ALIGN = 64
WRITING = "writing"
WAIT_S = 0.001, 0.05
"""How often it is looked whether a file is whole, at first and at last."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where the weights of one version lie; a JSON value by `asdict`.

    Example: Ticket(3, "shm", "/dev/shm/x/3-0", 64, [["a", "float32", [4, 4], 0]], "5f0c...")
    """

    version: int
    kind: Kind
    place: str
    """The file, how the names of the files begin, or the UUID of the GPU."""
    num_bytes: int
    """Of the file or the buffer, of all files that were written for this version."""
    tensors: list[list[Any]]
    """Name, dtype, shape, and where: the offset in the file or the buffer, or of several files the
    blocks, each [number of the source, offset in it, box]."""
    digest: str
    """Of all tensors by their names; "" where a name stands twice, which no receiver takes."""
    handle: dict[str, Any] = field(default_factory=dict)
    """Of the buffer on the GPU."""
    marks: tuple[str, ...] = ()
    """Files, one of each rank: WRITING, then nothing, or the reason why it failed."""
    sources: tuple[tuple[str, int], ...] = ()
    """Files and their bytes: of this version's ranks, and of versions before it that hold what did
    not change since. None where one file holds all."""
    base: tuple[Any, ...] = ()
    """Version and digest of the weights that differ in `tensors` outside `same` alone."""
    same: tuple[str, ...] = ()

    @property
    def files(self) -> list[str]:
        """To be removed with the ticket, unless another one names them too."""
        if self.kind == "ipc":
            return []
        return [*([file for file, _ in self.sources] or [self.place]), *self.marks]


def rank_file(place: str, rank: int) -> str:
    return f"{place}-rank-{rank}"


def lay_out(infos: Iterable[tuple[str, TensorInfo]]) -> tuple[list[list[Any]], int]:
    """The tensors of a ticket one after the other, and the bytes of all."""
    tensors: list[list[Any]] = []
    end = 0
    for name, info in infos:
        tensors.append([name, str(info.dtype)[6:], list(info.shape), end])
        end += info.size_bytes + -info.size_bytes % ALIGN
    return tensors, max(end, 1)


def views(flat: Tensor, tensors: list[list[Any]]) -> list[tuple[str, Tensor]]:
    """Tensors that lie one after the other in bytes."""
    pairs = []
    for name, kind, shape, offset in tensors:
        dtype = getattr(torch, kind)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if offset + num_bytes > flat.numel():
            raise RunError(f"{name} reaches beyond the end of the weights it is part of")
        pairs.append((name, flat[offset : offset + num_bytes].view(dtype).view(shape)))
    return pairs


def pairs_on_meta(ticket: Ticket) -> list[tuple[str, Tensor]]:
    return [
        (name, torch.empty(shape, dtype=getattr(torch, kind), device="meta"))
        for name, kind, shape, _ in ticket.tensors
    ]


async def wait_written(ticket: Ticket, check: Callable[[], None] = lambda: None) -> None:
    """Until every rank has written its part; RunError with the reason of one that could not.
    `check` raises if the ranks are gone."""
    pause, longest = WAIT_S
    for mark in map(Path, ticket.marks):
        while (said := read_mark(mark)) == WRITING:
            check()
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, longest)
        if said:
            raise RunError(said)


def read_mark(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        rule = f"whether weights are written cannot be known ({error.strerror})"
        raise InfraFailure(f"{path}: {rule}") from error


# Files.


def make_file(path: Path, size: int) -> Tensor:
    """The bytes of a new file in memory."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:  # room first: a page of shared memory that cannot be had ends the process
            os.posix_fallocate(file, 0, size)
        finally:
            os.close(file)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RunError(no_room(path, size, error)) from error
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def no_room(path: Path, size: int, error: OSError) -> str:
    rule = f"{path.parent}: weights of {size} bytes cannot be written ({error.strerror})"
    return f"{rule}; make room in it"


def write_ticket(version: int, pairs: TensorPairs, digest: str, path: Path, kind: Kind) -> Ticket:
    """Whole tensors of this process, in one file."""
    tensors, size = lay_out((n, TensorInfo(tuple(x.shape), x.dtype)) for n, x in pairs)
    mapped = make_file(path, size)
    copy_pairs(views(mapped, tensors), pairs)
    return Ticket(version, kind, str(path), size, tensors, digest)


def copy_pairs(into: TensorPairs, pairs: TensorPairs) -> None:
    torch._foreach_copy_([x for _, x in into], [x for _, x in pairs])


def read_file(ticket: Ticket, own: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Views of the file, which need not outlast the name; what lies in several is put together.
    Tensors of `own` are not read."""
    what = f"weights of version {ticket.version}"
    if not ticket.sources:
        return views(map_file(Path(ticket.place), ticket.num_bytes, what), ticket.tensors)
    read = [one for one in ticket.tensors if one[0] not in own]
    used = {number for *_, blocks in read for number, *_ in blocks}
    flats = {
        number: map_file(Path(file), size, what)
        for number, (file, size) in enumerate(ticket.sources)
        if number in used
    }
    found = dict(joined(flats, read)) | dict(own)
    return [(name, found[name]) for name, *_ in ticket.tensors]


def map_file(path: Path, size: int, what: str) -> Tensor:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise InfraFailure(f"{path}: {what} cannot be read ({error.strerror})") from error
    if found != size:
        rule = f"has {found} bytes where its ticket says {size}"
        raise RunError(f"{path}: {what}: the file {rule}")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def joined(flats: Mapping[int, Tensor], tensors: list[list[Any]]) -> list[tuple[str, Tensor]]:
    pairs = []
    for name, kind, shape, blocks in tensors:
        boxes = [tuple((start, stop) for start, stop in box) for *_, box in blocks]
        if fault := coverage_fault(boxes, tuple(shape)):
            raise RunError(f"{name}: {fault}")
        found = [
            views(flats[number], [[name, kind, box_shape(box), offset]])[0][1]
            for (number, offset, _), box in zip(blocks, boxes, strict=True)
        ]
        whole = found[0]
        if len(found) > 1:
            whole = torch.empty(shape, dtype=whole.dtype)
            for box, block in zip(boxes, found, strict=True):
                whole[slices(box)].copy_(block)
        pairs.append((name, whole))
    return pairs


# A buffer on a GPU.


def gpu_uuid(device: torch.device | int) -> str:
    """By which two processes know one GPU, however they number it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def share_on_gpu(version: int, flat: Tensor, tensors: list[list[Any]], digest: str) -> Ticket:
    """The buffer must stay until all receipts are here."""
    handle = gpu_handle(flat)
    torch.cuda.synchronize(flat.device)
    place = gpu_uuid(flat.device)
    return Ticket(version, "ipc", place, flat.numel(), tensors, digest, handle=handle)


def open_on_gpu(ticket: Ticket) -> list[tuple[str, Tensor]]:
    """The giver's own memory: to be read before the receipt, and written never."""
    found = [n for n in range(torch.cuda.device_count()) if gpu_uuid(n) == ticket.place]
    if not found:
        raise RunError(f"weights of version {ticket.version} lie on {ticket.place}, not on our GPU")
    return views(open_gpu_handle(ticket.handle, found[0]), ticket.tensors)


def open_ticket(
    value: Mapping[str, Any], own: Mapping[str, Tensor] | None = None
) -> list[tuple[str, Tensor]]:
    """The weights behind a ticket that came as a JSON value. `own`: tensors that the receiver has
    already, since it holds the ticket's base."""
    ticket = Ticket(**value)
    return open_on_gpu(ticket) if ticket.kind == "ipc" else read_file(ticket, own or {})
