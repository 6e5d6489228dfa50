"""Weights handed to other processes: receivers pull what the newest ticket (`tickets`) names.

A snapshot is written once for all receivers, by `file` only what changed (`deltas`). The newest
ticket stays valid until another one takes its place, so that a receiver that was started again can
pull it; an older one goes when nobody reads it any more, and its files with the last ticket that
names them. What lies in host memory goes by `shm` also where the kind is `ipc`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.core.roles import TensorPairs
from pentad.ops.digest import WeightDigest, digest_of
from pentad.sync.deltas import WrittenVersion, join_versions, unchanged
from pentad.sync.publisher import Snapshot
from pentad.sync.tickets import (
    Kind,
    Ticket,
    copy_pairs,
    lay_out,
    make_file,
    pairs_on_meta,
    read_file,
    share_on_gpu,
    views,
    wait_written,
    write_ticket,
)
from pentad.weights.transfer import TensorInfo

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Offer:
    """A ticket and what keeps it valid."""

    ticket: Ticket
    source: Iterable[tuple[str, Tensor]]
    """What was handed over, known again by its identity; nothing for a snapshot, a whole model
    that need not wait for the next one: its version and digest identify it."""
    kept: Tensor | None = None
    """A buffer that receivers read in place."""
    num_readers: int = 0
    is_elsewhere: bool = False
    """Whether another process made the ticket."""
    written: WrittenVersion | None = None
    """What the next version may be a delta to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketSnapshot(Snapshot):
    """Weights that another process holds or has written, known by their ticket."""

    ticket: Ticket


def snapshot_of(
    value: dict[str, Any], digest: dict[str, str], gather_s: float = 0.0
) -> TicketSnapshot:
    """Of a ticket that came as a JSON value; its tensors are not opened here."""
    ticket, known = Ticket(**value), WeightDigest()
    known.entries.update(digest)
    weights = tuple(pairs_on_meta(ticket))
    return TicketSnapshot(ticket.version, weights, known, True, gather_s, ticket=ticket)


async def opened(snapshot: TicketSnapshot, check: Callable[[], None]) -> Snapshot:
    """What a ticket names, mapped here; its files have no names any more."""
    await wait_written(snapshot.ticket, check)
    weights = tuple(await asyncio.to_thread(read_file, snapshot.ticket, {}))
    remove_files(snapshot.ticket)
    return Snapshot(snapshot.version, weights, snapshot.digest, True, snapshot.gather_s)


class Handoff:
    """The giving end, one for all receivers of a machine (or, by `file`, of all machines)."""

    def __init__(self, kind: Kind, folder: Path, *, deltas: bool = True) -> None:
        """`deltas`: files hold only what changed since the version before."""
        self.kind = kind
        self.deltas = deltas
        self.read: list[Offer] = []
        """Offers with readers."""
        self.folder = folder
        """Of the files; removed by its owner."""
        self.release: Callable[[int], None] = lambda version: None
        """Called when the ticket of a version that another process holds on a GPU is not needed
        any more."""
        self.check: Callable[[], None] = lambda: None
        """Raises what ended the process that writes tickets."""
        self.newest: Offer | None = None
        self.expected: dict[int, Offer] = {}
        """By version: of another process, and not offered yet."""
        self.writing = asyncio.Lock()

    def expect(self, snapshot: TicketSnapshot) -> None:
        """Ends the ticket with those after it, also if it is never offered."""
        self.expected[snapshot.version] = Offer(snapshot.ticket, (), is_elsewhere=True)

    def forget(self) -> None:
        """The process that made the tickets is gone, and the next one goes back to an earlier
        version: nobody may pull them any more."""
        ended = self._valid()
        self.expected, self.newest = {}, None
        self.release, self.check = lambda version: None, lambda: None
        for offer in ended:
            self._end(offer)
        read = {file for offer in self.read for file in offer.ticket.files}
        for path in self.folder.glob("[0-9]*"):  # also what was written and never said
            if str(path) not in read:
                path.unlink(missing_ok=True)

    async def offer(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Offer:
        """Writes the weights, unless they were by an earlier call of the same object."""
        async with self.writing:
            if self.newest is None or not is_same(self.newest, version, weights):
                if isinstance(weights, TicketSnapshot):
                    await wait_written(weights.ticket, self.check)
                    made = self.expected.pop(version, None)
                    made = made or Offer(weights.ticket, (), is_elsewhere=True)
                else:
                    base = self.newest.written if self.newest is not None else None
                    made = await asyncio.to_thread(self._make, version, weights, base)
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
        self.read.append(offer)
        try:
            yield offer.ticket
        finally:
            offer.num_readers -= 1
            self.read.remove(offer)
            self._end(offer)

    def _valid(self) -> list[Offer]:
        """Offers that a receiver may still pull."""
        return [*self.expected.values(), *([self.newest] if self.newest else [])]

    def _end(self, offer: Offer) -> None:
        if offer is self.newest or offer.num_readers:
            return
        offer.kept, offer.source = None, ()
        if offer.ticket.kind == "ipc" and offer.is_elsewhere:
            self.release(offer.ticket.version)  # nothing, where its process is another one
        elif offer.ticket.kind == "ipc":
            torch.cuda.ipc_collect()
        else:
            kept = {file for one in [*self._valid(), *self.read] for file in one.ticket.files}
            remove_files(offer.ticket, kept)

    def _make(
        self, version: int, weights: Iterable[tuple[str, Tensor]], base: WrittenVersion | None
    ) -> Offer:
        pairs = [(name, tensor.detach()) for name, tensor in weights]
        known, source = WeightDigest(), weights
        if isinstance(weights, Snapshot):
            known, source = weights.digest, ()
        elif len(dict(pairs)) == len(pairs):
            known = digest_of(pairs)
        digest = known.hex() if known.entries else ""
        if self.kind == "ipc" and all(tensor.is_cuda for _, tensor in pairs):
            # The ticket is good until the next one: nobody may write to the tensors meanwhile.
            tensors, size = lay_out((n, TensorInfo(tuple(x.shape), x.dtype)) for n, x in pairs)
            flat = torch.empty(size, dtype=torch.uint8, device=pairs[0][1].device)
            copy_pairs(views(flat, tensors), pairs)
            return Offer(share_on_gpu(version, flat, tensors, digest), source, flat)
        path = self.folder / f"{version}-{next(_numbers)}"
        if self.kind == "file" and digest:
            base = base if self.deltas else None
            ticket, written = _write_changed(version, pairs, known, path, base)
            return Offer(ticket, source, written=written)
        kind: Kind = "file" if self.kind == "file" else "shm"
        return Offer(write_ticket(version, pairs, digest, path, kind), source)


def _write_changed(
    version: int, pairs: TensorPairs, digest: WeightDigest, path: Path, base: WrittenVersion | None
) -> tuple[Ticket, WrittenVersion]:
    infos = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in pairs}
    same = unchanged(base, digest, infos)
    changed = [(name, tensor) for name, tensor in pairs if name not in set(same)]
    tensors, size = lay_out((name, infos[name]) for name, _ in changed)
    sizes, blocks = {}, {}
    if changed:
        copy_pairs(views(make_file(path, size), tensors), changed)
        sizes = {str(path): size}
        for name, _, shape, offset in tensors:
            blocks[name] = [[str(path), offset, [[0, stop] for stop in shape]]]
    written = WrittenVersion(version, digest, blocks, sizes)
    return join_versions(version, str(path), infos, digest, written, base, same, ())


def remove_files(ticket: Ticket, kept: Collection[str] = ()) -> None:
    for file in ticket.files:
        if file not in kept:
            Path(file).unlink(missing_ok=True)


def is_same(offer: Offer, version: int, weights: Iterable[tuple[str, Tensor]]) -> bool:
    if not isinstance(weights, Snapshot):
        return offer.source is weights
    return (offer.ticket.version, offer.ticket.digest) == (version, weights.digest.hex())
