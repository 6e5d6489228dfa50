"""The store: where the samples of ready groups lie until they are trained, by gid.

The ledger holds states and no payload, the store payload and no states. `put` replaces what it has
of a gid unless that is of a later attempt: a zombie never overwrites its successor.
"""

from __future__ import annotations

from pentad.core.errors import RunError
from pentad.core.types import Group


class Store:
    """Keeps the groups themselves: what is got is what was put, not a copy."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}

    def put(self, group: Group) -> None:
        """Keeps the group under its gid; ignored if a later attempt is already here."""
        held = self.groups.get(group.gid)
        if held is None or held.attempt <= group.attempt:
            self.groups[group.gid] = group

    def get(self, gid: int) -> Group:
        if gid not in self.groups:
            raise RunError(f"the samples of group {gid} are not in the store")
        return self.groups[gid]

    def delete(self, gid: int) -> None:
        """Forgets the group; nothing happens if it is not here."""
        self.groups.pop(gid, None)
