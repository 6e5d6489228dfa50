"""The server process: binds a socket, serves until stopped, finishes requests in progress, exits.

uvicorn has no timeout before the first request, and none for an answer that the client does not
read. Here every connection is checked twice a second and closed if it is overdue.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pentad.core.errors import Problem, RunError, UserError
from pentad.serve.wire import ApiError, ServeLimits

ConnectionPhase = Literal["head", "body", "answer", "writing", "closing"]

TICK_S = 0.5
ACCEPTED_AT_ONCE = 32
"""Maximum connections accepted between two checks of their number."""
RESERVED_FILES = 64
"""Number of open files reserved for the rest of the process."""
YOUNG_S = 0.5
"""Seconds that a connection has to send its request before another may replace it."""
BODY_GRACE_S = 5.0
"""Additional seconds, because the application answers 408 first."""


class Connections:
    """Open connections of one server."""

    def __init__(self, limits: ServeLimits) -> None:
        self.limits = limits
        self.of_client: dict[str, dict[HttpConnection, None]] = {}
        """Address of a client -> its connections, oldest first."""
        self.most = max(1, free_files() - RESERVED_FILES)
        self.patience_s: dict[ConnectionPhase, float] = {
            "head": limits.header_timeout_s,
            "body": limits.body_timeout_s + BODY_GRACE_S,
            "writing": limits.write_timeout_s,
            "closing": limits.write_timeout_s,
        }

    def __iter__(self) -> Iterator[HttpConnection]:
        return iter([one for held in self.of_client.values() for one in held])

    def __len__(self) -> int:
        return sum(map(len, self.of_client.values()))

    def admit(self, new: HttpConnection) -> bool:
        """Adds a connection. If there are too many, closes the oldest that has not sent a whole
        request; False if there is none."""
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

    def remove(self, connection: HttpConnection) -> None:
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
    """Returns the number of files that this process may still open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - sum(1 for _ in Path("/dev/fd").iterdir())


def raise_file_limit() -> None:
    """Raises the limit of open files to the system's maximum, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


BACKLOG = 2048
CANCEL_WAIT_S = 1.0
SEND_BUFFER = 256 << 10


class Server(uvicorn.Server):
    """Leaves signals to the owner of the event loop; uvicorn would raise them again at the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpConnection(H11Protocol):
    """A connection in `connections`, with its state and the time of its last progress."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.all = connections
        self.address = ""
        """The client's address."""
        self.num_changes = 0
        """Counts answers, and the times that the client reads a part of one."""
        self.seen: tuple[ConnectionPhase, int] = ("head", 0)
        """The state at the last check, and `num_changes` then."""
        self.since = time.monotonic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        super().connection_made(transport)
        if not self.all.admit(self):
            self.refuse()

    def connection_lost(self, exc: Exception | None) -> None:
        self.all.remove(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def on_response_complete(self) -> None:
        self.num_changes += 1
        super().on_response_complete()

    def resume_writing(self) -> None:
        self.num_changes += 1
        super().resume_writing()

    def phase(self) -> ConnectionPhase:
        if self.transport.is_closing():
            return "closing"
        if self.flow.write_paused:
            return "writing"
        if self.conn.their_state is h11.IDLE:
            return "head"
        return "body" if self.conn.their_state is h11.SEND_BODY else "answer"

    def cut_off(self) -> None:
        """Closes at once and drops unsent data."""
        self.all.remove(self)
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def refuse(self) -> None:
        problem = Problem("client", f"{self.address} has too many open connections")
        error = ApiError(problem, status=429, kind="rate_limit_error", code="too_many_connections")
        body = json.dumps(error.body()).encode()
        head = (
            "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 selects a free port. Raises UserError if this fails."""
    where = f"--host {host} --port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise UserError(Problem(where, f"is no address: {error}")) from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # For each connection: the kernel buffers data that the client does not read.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise UserError(Problem(where, f"cannot listen: {error.strerror}", "--port 0")) from error
    return found


async def serve(
    app: Callable[..., Any],
    listener: socket.socket,
    limits: ServeLimits,
    *,
    stop: asyncio.Event,
    drain_s: float,
    on_ready: Callable[[], None],
) -> None:
    """Serves until `stop` is set; then requests in progress have `drain_s` to finish."""
    connections = Connections(limits)
    server = Server(
        uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], partial(HttpConnection, connections)),
            ws="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # the client is the peer of the connection, not a header's
            backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
    )

    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        listener.listen(BACKLOG)  # uvicorn has one setting for this and for the number of accepts
        on_ready()
        await stop.wait()
        server.should_exit = True

    helpers = [asyncio.create_task(watch()), asyncio.create_task(connections.watch())]
    try:
        await server.serve(sockets=[listener])
    finally:
        if tasks := list(server.server_state.tasks):  # cancelled: they report this to their clients
            await asyncio.wait(tasks, timeout=CANCEL_WAIT_S)
        for connection in connections:
            connection.cut_off()
        for helper in helpers:
            helper.cancel()
        listener.close()
    if not stop.is_set():
        raise RunError("the HTTP server ended unexpectedly")
