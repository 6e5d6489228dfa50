"""The store: holds the samples of ready groups until they are trained, by gid.

The ledger holds states and no samples, the store samples and no states. For each gid the store has
one attempt, the latest that was put: a stale attempt never overwrites its successor, and putting an
attempt again changes nothing. Another process opens the same store from its address, which is JSON.
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
"""How often a lookup is repeated if the group was replaced meanwhile."""
LOOK_S = 0.2


class MissingGroups(RunError):
    """Groups that the store does not have."""

    def __init__(self, gids: Sequence[int]) -> None:
        super().__init__(f"the samples of group {gids[0]} are not in the store")
        self.gids = gids


class GroupStore(Protocol):
    address: Address

    def put(self, group: Group) -> None:
        """Keeps the group under its gid, whole or not at all; ignored if this or a later attempt is
        already here."""
        ...

    def get(self, gids: Iterable[int]) -> list[Group]:
        """The groups in this order, with all columns written so far; MissingGroups if one is
        missing. Changes by the caller do not affect other processes."""
        ...

    def missing(self, gids: Iterable[int]) -> list[int]:
        """The groups among these that are missing."""
        ...

    def write(self, gid: int, attempt: int, columns: ScoredColumns) -> bool:
        """Adds columns to the group. False, and no change, if this attempt is not the stored
        one."""
        ...

    def delete(self, gids: Iterable[int]) -> None:
        """Deletes groups; missing ones are ignored."""
        ...

    def close(self) -> None:
        """Closes this end; the process that made the store removes its content."""
        ...


class MemoryStore:
    """Keeps the groups themselves, for a single process: `get` returns the stored objects, not
    copies."""

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
    """Bytes under keys, shared by several processes. A blob appears whole or not at all."""

    address: Address
    patience_s: float
    """How long a reader in another process waits for missing blobs: a dead part restarts empty, and
    the maker of the store puts what is needed again."""

    def keys(self, gids: Iterable[int]) -> list[str]:
        """The keys of these groups."""
        ...

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        """Writes the pieces one after the other, replacing an earlier blob."""
        ...

    def get(self, keys: Sequence[str]) -> list[Any | None]:
        """One buffer per key; None for a missing key."""
        ...

    def delete(self, keys: Sequence[str]) -> None: ...

    def close(self) -> None: ...

    def describe(self, key: str) -> str:
        """The location, for messages."""
        ...


class BlobStore:
    """A store over shared bytes.

    Each attempt of a group, and each column that a scorer wrote for it, is a separate blob, so that
    writers in several processes never change the same one: `gid.attempt` and `gid.attempt.column`.
    The highest existing attempt is the group's.
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
        if base not in self.blobs.keys([gid]):  # deleted or replaced meanwhile
            self.blobs.delete(keys)
            return False
        return True

    def delete(self, gids: Iterable[int]) -> None:
        self.blobs.delete(self.blobs.keys(gids))

    def close(self) -> None:
        self.blobs.close()

    def _look(self, gids: Sequence[int]) -> Iterator[Group]:
        """The groups that exist, each at its latest attempt."""
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
"""Kind of an address -> the module whose `open_blobs` opens it; imported only when it is chosen."""


def open_store(address: Mapping[str, Any], prompt_of: PromptOf) -> GroupStore:
    """Opens the store that another process created."""
    kind = address["kind"]
    if kind not in KINDS:
        raise RunError(f"store {kind} cannot be opened by another process than the one it is in")
    blobs = import_module(KINDS[kind]).open_blobs(address)
    return BlobStore(blobs, prompt_of, patience_s=blobs.patience_s)
