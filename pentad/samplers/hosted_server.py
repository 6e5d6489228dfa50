"""A vLLM or SGLang server in a role process, on the machine that has its GPUs.

The process starts the server there and reaches it on that machine's own address. Weights are pulled
from the published folder, as an embedded sampler pulls them. The process ends when its server does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pentad.core.errors import InfraFailure
from pentad.samplers.dialect import LoadingDialect
from pentad.samplers.process import ServerSettings
from pentad.samplers.remote import HostedSampler
from pentad.samplers.sglang import Sglang
from pentad.samplers.started_server import StartedServer, start_server
from pentad.samplers.vllm import Vllm
from pentad.sync.published import open_weights

log = logging.getLogger(__name__)
T = TypeVar("T")

TARGET = f"{__name__}:make_server"
DIALECTS: dict[str, type[LoadingDialect]] = {"vllm": Vllm, "sglang": Sglang}


def payload_of(name: str, backend: str, settings: ServerSettings, log_file: Path) -> dict[str, Any]:
    """Arguments of the role process as a JSON value. The server uses the process's GPUs."""
    given = settings.model_copy(update={"devices": ()}).model_dump(mode="json")
    return {"name": name, "backend": backend, "settings": given, "log": str(log_file)}


def make_server(payload: Mapping[str, Any], emit: Callable[[str, Any], None]) -> HostedServer:
    """Makes the served object of a role process."""
    settings = ServerSettings.model_validate(payload["settings"])
    given = DIALECTS[payload["backend"]], settings, payload["name"], Path(payload["log"])
    return HostedServer(partial(start_server, *given))


class HostedServer(HostedSampler[StartedServer]):
    """Serves a vLLM or SGLang server, which the first call starts."""

    def __init__(self, start: Callable[[], Awaitable[StartedServer]]) -> None:
        super().__init__(None)
        self.start = start
        self.watching: asyncio.Task[None] | None = None

    async def hello(self) -> dict[str, Any]:
        """Starts the server in the main thread: the server ends with its parent thread."""
        server = await self.start()
        self.host(server)
        self.watching = asyncio.create_task(self._watch(server))
        return await super().hello()

    async def _watch(self, server: StartedServer) -> None:
        """Ends this process if its server ends; the scheduler then restarts it."""
        log.error("%s: %s", server.process.name, await server.lost)
        os.kill(os.getpid(), signal.SIGTERM)  # `role_host` exits on this signal

    async def _install(self, weights: dict[str, Any]) -> Any:
        pairs = await asyncio.to_thread(open_weights, weights)
        return await self.sampler.install(weights["version"], pairs)

    async def _answer(self, call: Awaitable[T]) -> T:
        """Answers a call; never returns if the server has ended, because this process ends next."""
        try:
            return await call
        except InfraFailure:
            if self.sampler.lost.done():
                await asyncio.Event().wait()
            raise

    async def close(self) -> None:
        if self.watching is not None:
            self.watching.cancel()
        await super().close()
