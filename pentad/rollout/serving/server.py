"""The server process: binds a socket, serves until told to stop, drains, ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from pentad.core.errors import Problem, RunError, UserError


class Server(uvicorn.Server):
    """Leaves signals to whoever runs the loop: uvicorn would raise them again at the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises UserError if there is none."""
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
        found.bind(address)
        found.listen(2048)
    except OSError as error:
        found.close()
        raise UserError(Problem(where, f"cannot listen: {error.strerror}", "--port 0")) from error
    return found


async def serve(
    app: Callable[..., Any],
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    drain_s: float,
    on_ready: Callable[[], None],
) -> None:
    """Serves until `stop` is set; then requests under way have `drain_s` to come to their end."""
    server = Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
    )

    async def watch() -> None:
        while not server.started:
            await asyncio.sleep(0.01)
        on_ready()
        await stop.wait()
        server.should_exit = True

    watcher = asyncio.create_task(watch())
    try:
        await server.serve(sockets=[listener])
    finally:
        watcher.cancel()
        listener.close()
    if not stop.is_set():
        raise RunError("the HTTP server ended by itself")
