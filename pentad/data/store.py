"""The store: holds the samples of ready groups until they are trained, by gid.

The ledger has states but no samples, the store has samples but no states. For each gid the store
keeps the latest attempt: an older attempt never overwrites a later one, and putting the same
attempt again has no effect. Other processes open the store by its address, which is JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from pentad.core.errors import RunError
from pentad.core.types import Group, Prompt
from pentad.data.packing import (
    Buffer,
    ScoredColumns,
    add_column,
    pack_column,
    pack_groups,
    unpack_column,
    unpack_groups,
)

PromptOf = Callable[[int], Prompt]
Address = dict[str, Any]

NUM_LOOKS = 5
"""Number of lookups if the group is replaced during a lookup."""
LOOK_S = 0.2


class MissingGroups(RunError):
    """Raised for groups that are not in the store."""

    def __init__(self, gids: Sequence[int]) -> None:
        super().__init__(f"the samples of group {gids[0]} are not in the store")
        self.gids = gids


class GroupStore(Protocol):
    address: Address

    def put(self, group: Group) -> None:
        """Stores the group under its gid atomically; ignored if this or a later attempt is already
        stored."""
        ...

    def get(self, gids: Iterable[int]) -> list[Group]:
        """The groups in this order, with all columns written so far; MissingGroups if one is
        missing. Changes by the caller do not affect other processes."""
        ...

    def missing(self, gids: Iterable[int]) -> list[int]:
        """The gids among these that are not in the store."""
        ...

    def write(self, gid: int, attempt: int, columns: ScoredColumns) -> bool:
        """Adds columns to the group. Returns False, without a change, if another attempt is
        stored."""
        ...

    def delete(self, gids: Iterable[int]) -> None:
        """Deletes groups; missing ones are ignored."""
        ...

    def close(self) -> None:
        """Closes the store in this process; the process that created it removes its content."""
        ...


class MemoryStore:
    """A store within one process: `get` returns the stored objects, not copies."""

    address: Address = {"kind": "memory"}

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}

    def put(self, group: Group) -> None:
        held = self.groups.get(group.gid)
        if held is None or held.attempt < group.attempt:
            self.groups[group.gid] = group

    def get(self, gids: Iterable[int]) -> list[Group]:
        gids = list(gids)
        if missing := self.missing(gids):
            raise MissingGroups(missing)
        return [self.groups[gid] for gid in gids]

    def missing(self, gids: Iterable[int]) -> list[int]:
        return [gid for gid in gids if gid not in self.groups]

    def write(self, gid: int, attempt: int, columns: ScoredColumns) -> bool:
        group = self.groups.get(gid)
        if group is None or group.attempt != attempt:
            return False
        for name, arrays in columns.items():
            add_column(group, name, arrays)
        return True

    def delete(self, gids: Iterable[int]) -> None:
        for gid in gids:
            self.groups.pop(gid, None)

    def close(self) -> None:
        self.groups.clear()


class Blobs(Protocol):
    """Bytes by key, shared by several processes. Blobs appear atomically."""

    address: Address
    patience_s: float
    """How long readers in other processes wait for missing blobs: a storage unit that died restarts
    empty, and the process that created the store writes the needed blobs again."""

    def keys(self, gids: Iterable[int]) -> list[str]:
        """The keys of these groups."""
        ...

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        """Writes the concatenated pieces; replaces an earlier blob."""
        ...

    def get(self, keys: Sequence[str]) -> list[Any | None]:
        """One buffer per key; None for a missing key."""
        ...

    def delete(self, keys: Sequence[str]) -> None: ...

    def close(self) -> None: ...

    def describe(self, key: str) -> str:
        """The location of a blob, for messages."""
        ...


class BlobStore:
    """A store over shared bytes.

    Each attempt of a group, and each column that a scorer wrote for it, is a separate blob, so that
    writers in several processes never change the same one: `gid.attempt` and `gid.attempt.column`.
    The highest existing attempt is the valid one.
    """

    def __init__(self, blobs: Blobs, prompt_of: PromptOf, *, patience_s: float = 0.0) -> None:
        """`patience_s`: how long `get` waits for missing groups."""
        self.blobs = blobs
        self.prompt_of = prompt_of
        self.patience_s = patience_s
        self.address = blobs.address

    def put(self, group: Group) -> None:
        held = self.blobs.keys([group.gid])
        if any(int(key.split(".")[1]) >= group.attempt for key in held):
            return
        self.blobs.put(f"{group.gid}.{group.attempt}", pack_groups([group]))
        self.blobs.delete(held)

    def get(self, gids: Iterable[int]) -> list[Group]:
        gids = list(gids)
        found: dict[int, Group] = {}
        missing, num_looks, until = gids, 0, time.monotonic() + self.patience_s
        while missing:
            found |= {group.gid: group for group in self._look(missing)}
            missing = [gid for gid in gids if gid not in found]
            num_looks += 1
            if missing and num_looks >= NUM_LOOKS:
                if time.monotonic() >= until:
                    raise MissingGroups(missing)
                time.sleep(LOOK_S)
        return [found[gid] for gid in gids]

    def missing(self, gids: Iterable[int]) -> list[int]:
        gids = list(gids)
        held = {int(key.partition(".")[0]) for key in self.blobs.keys(gids)}
        return [gid for gid in gids if gid not in held]

    def write(self, gid: int, attempt: int, columns: ScoredColumns) -> bool:
        base = f"{gid}.{attempt}"
        if base not in self.blobs.keys([gid]):
            return False
        keys = [f"{base}.{name}" for name in columns]
        for key, arrays in zip(keys, columns.values(), strict=True):
            self.blobs.put(key, pack_column(arrays))
        if base not in self.blobs.keys([gid]):  # deleted or replaced by now
            self.blobs.delete(keys)
            return False
        return True

    def delete(self, gids: Iterable[int]) -> None:
        self.blobs.delete(self.blobs.keys(gids))

    def close(self) -> None:
        self.blobs.close()

    def _look(self, gids: Sequence[int]) -> Iterator[Group]:
        """Yields the groups that exist, each at its latest attempt."""
        latest: dict[str, tuple[int, list[str]]] = {}
        for key in self.blobs.keys(gids):
            gid, number, *column = key.split(".", 2)
            attempt = int(number)
            if gid not in latest or attempt > latest[gid][0]:
                latest[gid] = attempt, []
            if attempt == latest[gid][0]:
                latest[gid][1].extend(column)
        keys = [
            key
            for gid, (attempt, columns) in latest.items()
            for key in (f"{gid}.{attempt}", *(f"{gid}.{attempt}.{name}" for name in columns))
        ]
        blobs = dict(zip(keys, self.blobs.get(keys), strict=True))
        for gid, (attempt, columns) in latest.items():
            base = f"{gid}.{attempt}"
            if blobs[base] is None:
                continue
            with self._reading(base):
                (group,) = unpack_groups(blobs[base], self.prompt_of)
            for name in columns:
                if (data := blobs[f"{base}.{name}"]) is not None:
                    with self._reading(f"{base}.{name}"):
                        add_column(group, name, unpack_column(data))
            yield group

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, LookupError) as error:
            raise RunError(f"{self.blobs.describe(key)} cannot be read: {error}") from error


KINDS = {
    "files": "pentad.data.file_blobs",
    "ray": "pentad.data.ray_blobs",
    "transfer_queue": "pentad.data.transfer_queue_blobs",
}
"""Kind of an address -> module with its `open_blobs`; imported only when it is used."""


def open_store(address: Mapping[str, Any], prompt_of: PromptOf) -> GroupStore:
    """Opens the store that another process created."""
    kind = address["kind"]
    if kind not in KINDS:
        raise RunError(f"store {kind} can be opened only by the process that created it")
    blobs = import_module(KINDS[kind]).open_blobs(address)
    return BlobStore(blobs, prompt_of, patience_s=blobs.patience_s)
