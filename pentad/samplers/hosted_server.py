"""A vLLM or SGLang server in a role process, on the machine that has its GPUs.

The process starts the server there, reaches it on that machine's own address, and serves the
methods that `remote.RemoteSampler` calls: weights are pulled by ticket, as an embedded sampler
pulls them. It ends when the server does, and is started again as any replica.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pentad.core.dims import ModelDims
from pentad.core.errors import InfraFailure
from pentad.samplers import sglang, vllm
from pentad.samplers.process import ServerSettings
from pentad.samplers.remote import pack_generation, request_of, with_tuples
from pentad.samplers.server_replica import KeptWeights, ServerRemote
from pentad.sync.tickets import open_ticket

log = logging.getLogger(__name__)
T = TypeVar("T")

TARGET = f"{__name__}:make_server"
START = {"vllm": vllm.start, "sglang": sglang.start}


def payload_of(name: str, backend: str, settings: ServerSettings, log_file: Path) -> dict[str, Any]:
    """What the role process is made from, as a JSON value. Its own GPUs are the server's."""
    given = asdict(settings) | {"devices": (), "transfer_folder": str(settings.transfer_folder)}
    return {"name": name, "backend": backend, "settings": given, "log": str(log_file)}


def make_server(payload: Mapping[str, Any], emit: Callable[[str, Any], None]) -> HostedServer:
    """The target of a role process."""
    given = with_tuples(payload["settings"])
    given["dims"] = ModelDims(**with_tuples(given["dims"]))
    given["transfer_folder"] = Path(given["transfer_folder"])
    settings = ServerSettings(**given)
    return HostedServer(payload["name"], payload["backend"], settings, Path(payload["log"]), emit)


class HostedServer:
    """A server's methods with JSON values and arrays for arguments."""

    def __init__(
        self,
        name: str,
        backend: str,
        settings: ServerSettings,
        log_file: Path,
        emit: Callable[[str, Any], None],
    ) -> None:
        self.name = name
        self.backend = backend
        self.settings = settings
        self.log_file = log_file
        self.emit = emit
        self.remote: ServerRemote | None = None
        self.watching: asyncio.Task[None] | None = None

    async def hello(self) -> dict[str, Any]:
        """Starts the server: in the main thread, with which it ends."""
        sampler = await START[self.backend](self.settings, self.name, self.log_file)
        self.remote = ServerRemote(sampler, KeptWeights())
        self.watching = asyncio.create_task(self._watch(self.remote))
        capabilities = sorted(sampler.capabilities)
        return {"capabilities": capabilities, "version": sampler.version, "stats": self.stats()}

    async def _watch(self, remote: ServerRemote) -> None:
        """This process without its server is of no use: its starter sees it end."""
        log.error("%s: %s", self.name, await remote.lost)
        os.kill(os.getpid(), signal.SIGTERM)  # `role_host` ends by it

    @property
    def _open(self) -> ServerRemote:
        if self.remote is None:
            raise InfraFailure(f"{self.name} has not started")
        return self.remote

    async def generate(self, request: dict[str, Any], is_heard: bool) -> dict[str, Any]:
        def report(index: int, id_: int, logprob: float) -> None:
            self.emit("token", [request["id"], index, id_, logprob])

        wanted, heard = request_of(request), report if is_heard else None
        made = await self._unless_ended(self._open.generate(wanted, heard))
        return {"generations": [pack_generation(one) for one in made], "stats": self.stats()}

    async def pull(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Installs what the ticket names; the server says what reached it."""
        pairs = await asyncio.to_thread(open_ticket, ticket)
        return asdict(await self._unless_ended(self._open.install(ticket["version"], pairs)))

    async def _unless_ended(self, call: Awaitable[T]) -> T:
        """Answers nothing once the server has ended: the end of this process, which follows, is
        what its caller has to know."""
        try:
            return await call
        except InfraFailure:
            if self._open.lost.done():
                await asyncio.Event().wait()
            raise

    async def abort(self, request_id: str) -> None:
        await self._open.abort(request_id)

    async def pause(self) -> None:
        await self._open.pause()

    async def resume(self) -> None:
        await self._open.resume()

    async def rewind(self) -> None:
        await self._open.rewind()

    async def sleep(self) -> None:
        await self._open.sleep()

    async def wake(self) -> None:
        await self._open.wake()

    async def health(self) -> None:
        await self._open.health()

    def stats(self) -> dict[str, float]:
        return self.remote.stats() if self.remote else {}

    async def close(self) -> None:
        if self.watching is not None:
            self.watching.cancel()
        if self.remote is not None:
            await self.remote.close()
