"""Weights handed to other processes: a ticket says where they lie, and receivers pull them.

A snapshot is written once for all receivers. The newest ticket stays valid until another one takes
its place, so that a receiver that was started again can pull it; an older one goes when nobody
reads it any more. Kinds: `shm` (a file in shared memory), `file` (a file in a folder that all
machines see), `ipc` (handles of tensors on a GPU that both processes use; what lies in host memory
goes by `shm`).
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from pentad.core.errors import RunError
from pentad.core.failures import InfraFailure
from pentad.ops.digest import WeightDigest, digest_of
from pentad.sync.publisher import Snapshot

Kind = Literal["shm", "file", "ipc"]
Pairs = Sequence[tuple[str, Tensor]]
ALIGN = 64
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where the weights of one version lie; a JSON value by `asdict`.

    Example: Ticket(3, "shm", "/dev/shm/x/3-0", 64, [["a", "float32", [4, 4], 0]], "5f0c...")
    """

    version: int
    kind: Kind
    place: str
    """The file, or the UUID of the GPU."""
    num_bytes: int
    tensors: list[list[Any]]
    """Name, dtype, shape, and offset in the file or handle of each."""
    digest: str
    """Of all tensors by their names; "" where a name stands twice, which no receiver takes."""


@dataclass(slots=True, eq=False)
class Offer:
    """A ticket and what keeps it valid."""

    ticket: Ticket
    source: Iterable[tuple[str, Tensor]]
    """What was handed over, known again by its identity; nothing for a snapshot, a whole model
    that need not wait for the next one: its version and digest tell."""
    kept: Pairs
    """Tensors that receivers read in place."""
    num_readers: int = 0
    is_elsewhere: bool = False
    """Whether another process made the ticket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketSnapshot(Snapshot):
    """Weights that another process holds or has written, known by their ticket."""

    ticket: Ticket


def snapshot_of(value: dict[str, Any], digest: dict[str, str]) -> TicketSnapshot:
    """Of a ticket that came as a JSON value. What lies on a GPU is not opened here."""
    ticket = Ticket(**value)
    weights = pairs_on_meta(ticket) if ticket.kind == "ipc" else read_file(ticket)
    known = WeightDigest()
    known.entries.update(digest)
    return TicketSnapshot(ticket.version, tuple(weights), known, is_copy=True, ticket=ticket)


def pairs_on_meta(ticket: Ticket) -> list[tuple[str, Tensor]]:
    return [
        (name, torch.empty(shape, dtype=getattr(torch, kind), device="meta"))
        for name, kind, shape, _ in ticket.tensors
    ]


class Handoff:
    """The giving end, one for all receivers of a machine (or, by `file`, of all machines)."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        """Of the files; removed by its owner."""
        self.release: Callable[[int], None] = lambda version: None
        """Called when the ticket of a version that another process holds on a GPU is not needed
        any more."""
        self.newest: Offer | None = None
        self.expected: dict[int, Offer] = {}
        """By version: of another process, and not offered yet."""
        self.writing = asyncio.Lock()

    def expect(self, snapshot: TicketSnapshot) -> None:
        """Ends the ticket with those after it, also if it is never offered."""
        self.expected[snapshot.version] = Offer(snapshot.ticket, (), (), is_elsewhere=True)

    def forget(self) -> None:
        """The process that made the tickets is gone, and the next one goes back to an earlier
        version: nobody may pull them any more."""
        ended = [*self.expected.values(), *([self.newest] if self.newest else [])]
        self.expected, self.newest = {}, None
        self.release = lambda version: None
        for offer in ended:
            self._end(offer)
        read = {offer.ticket.place for offer in ended if offer.num_readers}
        for path in self.folder.glob("[0-9]*"):  # also what was written and never said
            if str(path) not in read:
                path.unlink(missing_ok=True)

    async def offer(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Offer:
        """Writes the weights, unless they were by an earlier call of the same object."""
        async with self.writing:
            if self.newest is None or not is_same(self.newest, version, weights):
                made = await asyncio.to_thread(self._make, version, weights)
                old, self.newest = self.newest, made
                if old is not None:
                    self._end(old)
            for older in [one for one in self.expected if one <= version]:
                self._end(self.expected.pop(older))
            return self.newest

    @contextmanager
    def reading(self, offer: Offer) -> Iterator[Ticket]:
        """Within, the ticket stays valid also if a newer one is offered."""
        offer.num_readers += 1
        try:
            yield offer.ticket
        finally:
            offer.num_readers -= 1
            self._end(offer)

    def _end(self, offer: Offer) -> None:
        if offer is self.newest or offer.num_readers:
            return
        offer.kept, offer.source = (), ()
        if offer.ticket.kind == "ipc" and offer.is_elsewhere:
            self.release(offer.ticket.version)  # nothing, where its process is another one
        elif offer.ticket.kind == "ipc":
            torch.cuda.ipc_collect()
        else:
            Path(offer.ticket.place).unlink(missing_ok=True)

    def _make(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Offer:
        if isinstance(weights, TicketSnapshot):
            return self.expected.pop(version, None) or Offer(
                weights.ticket, (), (), is_elsewhere=True
            )
        pairs = [(name, tensor.detach()) for name, tensor in weights]
        digest, source = "", weights
        if isinstance(weights, Snapshot):
            digest, source = weights.digest.hex(), ()
        elif len(dict(pairs)) == len(pairs):
            digest = digest_of(pairs).hex()
        if self.kind == "ipc" and all(tensor.is_cuda for _, tensor in pairs):
            # The ticket is good until the next one: nobody may write to the tensors meanwhile.
            if isinstance(weights, Snapshot) and weights.is_copy:
                kept = [(name, tensor.contiguous()) for name, tensor in pairs]
            else:
                form = torch.contiguous_format
                kept = [(name, tensor.clone(memory_format=form)) for name, tensor in pairs]
            return Offer(share_on_gpu(version, kept, digest), source, kept)
        path = self.folder / f"{version}-{next(_numbers)}"
        kind: Kind = "file" if self.kind == "file" else "shm"
        return Offer(write_ticket(version, pairs, digest, path, kind), source, ())


def is_same(offer: Offer, version: int, weights: Iterable[tuple[str, Tensor]]) -> bool:
    if not isinstance(weights, Snapshot):
        return offer.source is weights
    return (offer.ticket.version, offer.ticket.digest) == (version, weights.digest.hex())


# Files.


def write_ticket(version: int, pairs: Pairs, digest: str, path: Path, kind: Kind) -> Ticket:
    tensors: list[list[Any]] = []
    end = 0
    for name, tensor in pairs:
        tensors.append([name, str(tensor.dtype)[6:], list(tensor.shape), end])
        end += tensor.nbytes + -tensor.nbytes % ALIGN
    draft = path.with_suffix(".draft")
    try:
        file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:  # room first: a page of shared memory that cannot be had ends the process
            os.posix_fallocate(file, 0, max(end, 1))
        finally:
            os.close(file)
        mapped = torch.from_file(str(draft), shared=True, size=max(end, 1), dtype=torch.uint8)
        for (_, tensor), (*_, offset) in zip(pairs, tensors, strict=True):
            part = mapped[offset : offset + tensor.nbytes]
            if tensor.nbytes:
                part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        del mapped
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        told = f"{path.parent}: weights of {end} bytes cannot be written ({error.strerror})"
        raise RunError(f"{told}; make room in it") from error
    return Ticket(version, kind, str(path), max(end, 1), tensors, digest)


def read_file(ticket: Ticket) -> list[tuple[str, Tensor]]:
    """Views of the file, which need not outlast the name."""
    path = Path(ticket.place)
    try:
        size = path.stat().st_size
    except OSError as error:
        told = f"{path}: weights of version {ticket.version} cannot be read ({error.strerror})"
        raise InfraFailure(told) from error
    if size != ticket.num_bytes:
        rule = f"has {size} bytes where its ticket says {ticket.num_bytes}"
        raise RunError(f"{path}: weights of version {ticket.version}: the file {rule}")
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    pairs = []
    for name, kind, shape, offset in ticket.tensors:
        dtype = getattr(torch, kind)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if offset + num_bytes > size:
            raise RunError(f"{path}: {name} reaches beyond the end of the file")
        flat = mapped[offset : offset + num_bytes].view(dtype)
        pairs.append((name, flat.view(shape)))
    return pairs


# Handles.


def gpu_uuid(device: torch.device | int) -> str:
    """By which two processes know one GPU, however they number it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def share_on_gpu(version: int, pairs: Pairs, digest: str) -> Ticket:
    """Tensors of one GPU; they must stay until all receipts are here."""
    devices = {tensor.device for _, tensor in pairs}
    assert len(devices) == 1 and pairs[0][1].is_cuda, "weights to share lie on one GPU"
    tensors = []
    for name, tensor in pairs:
        _, arguments = reduce_tensor(tensor)
        handle = [
            base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for value in arguments[7:]
        ]
        offset = arguments[3]
        tensors.append([name, str(tensor.dtype)[6:], list(tensor.shape), [offset, *handle]])
    device = pairs[0][1].device
    torch.cuda.synchronize(device)
    num_bytes = sum(tensor.nbytes for _, tensor in pairs)
    return Ticket(version, "ipc", gpu_uuid(device), num_bytes, tensors, digest)


def open_on_gpu(ticket: Ticket) -> list[tuple[str, Tensor]]:
    """The giver's own memory: to be read before the receipt, and written never."""
    found = [n for n in range(torch.cuda.device_count()) if gpu_uuid(n) == ticket.place]
    if not found:
        raise RunError(f"weights of version {ticket.version} lie on {ticket.place}, not on our GPU")
    pairs = []
    for name, kind, shape, (offset, *packed) in ticket.tensors:
        stride = torch.empty(shape, device="meta").stride()
        handle = [base64.b64decode(v) if isinstance(v, str) else v for v in packed]
        dtype, storage = getattr(torch, kind), torch.storage.TypedStorage
        places = (Tensor, torch.Size(shape), stride, offset, storage, dtype, found[0])
        pairs.append((name, rebuild_cuda_tensor(*places, *handle)))
    return pairs


def open_ticket(value: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The weights behind a ticket that came as a JSON value."""
    ticket = Ticket(**value)
    return open_on_gpu(ticket) if ticket.kind == "ipc" else read_file(ticket)
