"""Weights published to other processes, which pull the newest version (`published`).

A snapshot is written once for all receivers; with `file` only its changes (`deltas`). The newest
version is kept until another replaces it, so that a restarted receiver can pull it; older ones are
removed when they have no readers. Weights in host memory use `shm` even if the kind is `ipc`.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.ops.digest import WeightDigest, digest_of
from pentad.sync.deltas import WrittenVersion, make_version
from pentad.sync.published import (
    Kind,
    PublishedWeights,
    by_width,
    copy_pairs,
    infos_of,
    make_buffer,
    open_weights,
    share_on_gpu,
    wait_written,
    write_pairs,
)
from pentad.sync.publisher import Snapshot

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class PublishedVersion:
    """Published weights and the resources that keep them valid."""

    weights: PublishedWeights
    source: Iterable[tuple[str, Tensor]]
    """The published object, compared by identity; None for a snapshot, which is compared by version
    and digest, so that a whole model need not be kept."""
    kept: Tensor | None = None
    """A buffer that receivers read in place."""
    is_elsewhere: bool = False
    """Whether another process published them."""
    written: WrittenVersion | None = None
    """Base for the delta of the next version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSnapshot(Snapshot):
    """Weights that another process has in memory or has written."""

    published: PublishedWeights

    @property
    def num_tensors(self) -> int:
        return self.published.num_tensors


def snapshot_of(
    value: dict[str, Any], digest: dict[str, str], gather_s: float = 0.0
) -> PublishedSnapshot:
    """Makes the snapshot of `PublishedWeights` given as a JSON value, without opening its
    tensors."""
    published, known = PublishedWeights(**value), WeightDigest()
    known.entries.update(digest)
    return PublishedSnapshot(published.version, (), known, True, gather_s, published=published)


async def opened(snapshot: PublishedSnapshot, check: Callable[[], None]) -> Snapshot:
    """Maps the published tensors into this process; removes their files."""
    await wait_written(snapshot.published, check)
    weights = tuple(await asyncio.to_thread(open_weights, asdict(snapshot.published)))
    snapshot.published.remove()
    return Snapshot(snapshot.version, weights, snapshot.digest, True, snapshot.gather_s)


class WeightsDir:
    """The published versions, for all receivers of a machine (or, by `file`, of all machines)."""

    def __init__(self, kind: Kind, folder: Path, *, deltas: bool = True) -> None:
        """`deltas`: files hold only the changes since the previous version."""
        self.kind = kind
        self.deltas = deltas
        self.read: list[PublishedVersion] = []
        """The version of each reader."""
        self.folder = folder
        """Parent of the folders of weights; its owner removes it."""
        self.release: Callable[[int], None] = lambda version: None
        """Called when a version in another process's GPU memory is no longer needed."""
        self.check: Callable[[], None] = lambda: None
        """Raises the failure of the process that publishes."""
        self.newest: PublishedVersion | None = None
        self.retained: dict[int, PublishedVersion] = {}
        """Versions written by another process and not published yet."""
        self.writing = asyncio.Lock()

    def retain(self, snapshot: PublishedSnapshot) -> None:
        """Keeps the files of another process until a later version is published, even if this one
        is never published."""
        self.retained[snapshot.version] = PublishedVersion(
            snapshot.published, (), is_elsewhere=True
        )

    def drop_all(self) -> None:
        """Drops all versions. Called when the publishing process is lost, because the next one
        restarts from an earlier version."""
        ended = [*self.retained.values(), *([self.newest] if self.newest else [])]
        self.retained, self.newest = {}, None
        self.release, self.check = lambda version: None, lambda: None
        for published in ended:
            self._end(published)
        read = {published.weights.place for published in self.read}
        for path in self.folder.glob("[0-9]*"):  # also folders that were never reported
            if str(path) not in read:
                shutil.rmtree(path, ignore_errors=True)

    async def publish(
        self, version: int, weights: Iterable[tuple[str, Tensor]]
    ) -> PublishedVersion:
        """Writes the weights, unless an earlier call with the same object did."""
        async with self.writing:
            if self.newest is None or not is_same(self.newest, version, weights):
                if isinstance(weights, PublishedSnapshot):
                    await wait_written(weights.published, self.check)
                    made = self.retained.pop(version, None)
                    made = made or PublishedVersion(weights.published, (), is_elsewhere=True)
                else:
                    base = self.newest.written if self.newest is not None else None
                    made = await asyncio.to_thread(self._make, version, weights, base)
                old, self.newest = self.newest, made
                if old is not None:
                    self._end(old)
            for older in [one for one in self.retained if one <= version]:
                self._end(self.retained.pop(older))
            return self.newest

    @contextmanager
    def reading(self, published: PublishedVersion) -> Iterator[PublishedWeights]:
        """While active, the version stays valid even if a newer one is published."""
        self.read.append(published)
        try:
            yield published.weights
        finally:
            self.read.remove(published)
            self._end(published)

    def _end(self, published: PublishedVersion) -> None:
        if published is self.newest or published in self.read:
            return
        published.kept, published.source = None, ()
        if published.weights.kind != "ipc":
            published.weights.remove()
        elif published.is_elsewhere:
            self.release(published.weights.version)  # no effect if its process has been replaced
        else:
            torch.cuda.ipc_collect()

    def _make(
        self, version: int, weights: Iterable[tuple[str, Tensor]], base: WrittenVersion | None
    ) -> PublishedVersion:
        pairs = [(name, tensor.detach()) for name, tensor in weights]
        infos, source = infos_of(pairs), weights
        if isinstance(weights, Snapshot):
            known, source = weights.digest, ()
        else:
            known = digest_of(pairs)
        if self.kind == "ipc" and all(tensor.is_cuda for _, tensor in pairs):
            # Valid until the next one: nothing may write to the tensors meanwhile.
            layout = by_width(infos)
            flat = make_buffer(layout, pairs[0][1].device)
            copy_pairs(layout.views(flat), pairs)
            return PublishedVersion(
                share_on_gpu(version, flat, len(pairs), known.hex()), source, flat
            )
        path = self.folder / f"{version}-{next(_numbers)}"
        if self.kind != "file":
            return PublishedVersion(write_pairs(version, pairs, known.hex(), path), source)
        plan, room = make_version(version, path, infos, known, base if self.deltas else None)
        if room is not None:
            changed = [(name, tensor) for name, tensor in pairs if name in plan.changed]
            copy_pairs(plan.layout.views(room), changed)
        return PublishedVersion(plan.published(), source, written=plan.written)


def is_same(
    published: PublishedVersion, version: int, weights: Iterable[tuple[str, Tensor]]
) -> bool:
    if not isinstance(weights, Snapshot):
        return published.source is weights
    return (published.weights.version, published.weights.digest) == (version, weights.digest.hex())
