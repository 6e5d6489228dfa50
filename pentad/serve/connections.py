"""Connections: how many there may be, and how long a client may take for its part.

uvicorn has no timeout before the first request nor for an answer that is not taken. Here every
connection is looked at twice a second and cut off when it is overdue.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

from pentad.serve.limits import ServeLimits

Phase = Literal["head", "body", "answer", "writing", "closing"]

TICK_S = 0.5
ACCEPTED_AT_ONCE = 32
"""Connections taken between two looks at their number."""
RESERVED_FILES = 64
"""Open files left to the rest of the process."""
YOUNG_S = 0.5
"""A connection is given so long to send its request before it has to make room for another."""
BODY_GRACE_S = 5.0
"""The application answers 408 first."""


class ClientConnection(Protocol):
    """What has to be known of one."""

    address: str
    """The client's."""
    seen: tuple[Phase, int]
    """The phase when it was last looked at, and `num_changes` then."""
    since: float
    num_changes: int
    """Grows with every answer and every time the client takes some of one."""

    def phase(self) -> Phase: ...

    def cut_off(self) -> None: ...


class Connections:
    """Those of one server."""

    def __init__(self, limits: ServeLimits) -> None:
        self.limits = limits
        self.of_client: dict[str, dict[ClientConnection, None]] = {}
        """Address -> its connections, the oldest first."""
        self.most = max(1, free_files() - RESERVED_FILES)
        self.patience_s: dict[Phase, float] = {
            "head": limits.header_timeout_s,
            "body": limits.body_timeout_s + BODY_GRACE_S,
            "writing": limits.write_timeout_s,
            "closing": limits.write_timeout_s,
        }

    def __iter__(self) -> Iterator[ClientConnection]:
        return iter([one for held in self.of_client.values() for one in held])

    def __len__(self) -> int:
        return sum(map(len, self.of_client.values()))

    def admit(self, new: ClientConnection) -> bool:
        """Adds it. Where there are too many, the oldest that has not sent a whole request makes
        room; False if there is none."""
        own = self.of_client.setdefault(new.address, {})
        too_many = len(own) >= self.limits.max_client_connections and own
        if not too_many and len(self) >= self.most:
            too_many = dict.fromkeys(self)
        if too_many:
            waiting = [one for one in too_many if one.phase() in ("head", "body", "closing")]
            oldest = min(waiting, key=lambda one: one.since, default=None)
            if oldest is None or time.monotonic() - oldest.since < YOUNG_S:
                return False
            oldest.cut_off()
        own[new] = None
        return True

    def remove(self, connection: ClientConnection) -> None:
        own = self.of_client.get(connection.address, {})
        own.pop(connection, None)
        if not own:
            self.of_client.pop(connection.address, None)

    def cut_off_overdue(self) -> None:
        now = time.monotonic()
        for one in self:
            found = (one.phase(), one.num_changes)
            if found != one.seen:
                one.seen, one.since = found, now
            if now - one.since > self.patience_s.get(found[0], float("inf")):
                one.cut_off()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.cut_off_overdue()


def free_files() -> int:
    """How many more this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - sum(1 for _ in Path("/dev/fd").iterdir())


def raise_file_limit() -> None:
    """To what the system allows, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
