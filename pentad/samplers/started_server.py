"""Servers of a run: attached by address, or started here and monitored.

The newest weights are kept for restarted servers. If they are the learner's own tensors, its next
step changes them; a server that starts after that step gets its first weights with the next
publish.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.core.errors import FlawedAnswer, InfraFailure, RunError
from pentad.core.roles import Installed, NamedTensors
from pentad.core.types import Generation, Request
from pentad.ops.digest import WeightDigest, digest_of
from pentad.samplers import server_key
from pentad.samplers.dialect import Dialect, LoadingDialect, release
from pentad.samplers.http import Wire
from pentad.samplers.process import (
    ServerProcess,
    ServerSettings,
    check_installed,
    free_port,
    server_environment,
    server_python,
    soon_lost,
)
from pentad.samplers.served import is_converted, served_folder
from pentad.samplers.server_sampler import ServerSampler
from pentad.sync.publisher import Snapshot

log = logging.getLogger(__name__)

POLL_S = 0.1


@dataclass(slots=True, eq=False)
class HeldVersion:
    """Weights of one version."""

    version: int
    weights: Iterable[tuple[str, Tensor]]
    digest: WeightDigest | None
    """Digest of tensors that may change later; else None."""

    def is_whole(self) -> bool:
        """Whether the tensors still have the values of the version."""
        return self.digest is None or digest_of(self.weights).hex() == self.digest.hex()

    async def move_to_host(self) -> None:
        """Moves copies on a GPU to host memory, once a server has them, to free GPU memory."""
        pairs = [] if self.digest is not None else list(self.weights)
        if any(tensor.is_cuda for _, tensor in pairs):
            self.weights = await asyncio.to_thread(lambda: [(n, t.cpu()) for n, t in pairs])


class HeldWeights:
    """The newest weights, for all servers that this process started."""

    def __init__(self) -> None:
        self.newest: HeldVersion | None = None

    async def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> HeldVersion:
        if self.newest is None or self.newest.weights is not weights:
            is_live = isinstance(weights, Snapshot) and not weights.is_copy
            digest = weights.digest if isinstance(weights, Snapshot) and is_live else None
            self.newest = HeldVersion(version, weights, digest)
        return self.newest


class StartedServer(ServerSampler):
    """The client of a server that this process started; unusable once the server has ended."""

    def __init__(
        self, dialect: Dialect, dims: ModelDims, *, max_context: int, process: ServerProcess
    ) -> None:
        super().__init__(dialect, dims, max_context=max_context)
        self.process = process
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.watching = asyncio.create_task(self._watch())
        self.moving: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> list[Generation]:
        try:
            return await super().generate(request)
        except InfraFailure as failure:
            if await soon_lost(self.lost):
                raise
            raise FlawedAnswer(str(failure)) from failure
        except RunError as error:
            if not self.is_closed and await soon_lost(self.lost):
                raise InfraFailure(str(error)) from error
            raise

    async def install(self, version: int, weights: NamedTensors) -> Installed:
        """Installs weights; raises InfraFailure if the server has ended meanwhile."""
        try:
            return await super().install(version, weights)
        except RunError as error:
            if await soon_lost(self.lost):
                raise InfraFailure(str(error)) from error
            raise

    async def pull(self, published: HeldVersion) -> Installed:
        if self.version < 0 and not await asyncio.to_thread(published.is_whole):
            return await self._without_weights("was restarted and has no weights yet")
        try:
            receipt = await self.install(published.version, published.weights)
        except InfraFailure:
            raise
        except RunError as error:
            if await asyncio.to_thread(published.is_whole):
                raise
            return await self._without_weights(f"took weights while they changed ({error})")
        if published.digest is not None and receipt.digest != published.digest.hex():
            return await self._without_weights(
                f"took other weights than version {published.version}"
            )
        self.moving = asyncio.create_task(published.move_to_host())
        self.moving.add_done_callback(_log_failure)
        return receipt

    async def call(self, method: str, **arguments: Any) -> Any:
        """Calls a method of the sampler, with the interface of a role process."""
        return await getattr(self, method)(**arguments)

    async def _without_weights(self, why: str) -> Installed:
        """Marks the weights as unknown: the server is unused until the next install."""
        await self.rewind()
        self.unknown_weights_reason = f"{self.process.name} {why}"
        return Installed(-1, 0, "")

    async def close(self) -> None:
        """Closes the connection and ends the server."""
        if self.is_closed:
            return
        self.watching.cancel()
        if self.moving is not None:
            self.moving.cancel()
        await super().close()
        await self.process.stop()

    def _check_open(self) -> None:
        super()._check_open()
        self.process.check()

    async def _watch(self) -> None:
        while (ended := self.process.poll()) is None:
            await asyncio.sleep(POLL_S)
        self.lost.set_result(f"it {ended}")


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.warning("the newest weights stay on the GPU: %r", failure)


# Starting and attaching.


@asynccontextmanager
async def closed_on_failure(wire: Wire) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await wire.close()
        raise


async def attach_server(
    kind: type[LoadingDialect],
    address: str,
    settings: ServerSettings,
    process: ServerProcess | None = None,
) -> ServerSampler:
    """Returns a client of the server at `address`, whose weights are unknown. `process`: its
    process, if started here."""
    where = f"rollout.server.addresses = {address}"
    wire = Wire(address, kind.product, settings.key)
    async with closed_on_failure(wire):
        try:
            started_at = f"{kind.product} at {address}"
            dialect = await kind.open(wire, where if process is None else started_at, settings)
        except InfraFailure as failure:
            raise RunError(str(failure)) from failure
    dims, max_context = settings.dims, settings.max_context
    if process is None:
        return ServerSampler(dialect, dims, max_context=max_context)
    return StartedServer(dialect, dims, max_context=max_context, process=process)


async def start_server(
    kind: type[LoadingDialect], settings: ServerSettings, name: str, log_file: Path
) -> StartedServer:
    """Starts a server on this machine with unusable weights: an install must follow."""
    with ExitStack() as stack:
        if is_converted(settings):
            folder = await asyncio.to_thread(stack.enter_context, served_folder(settings))
            settings = settings.model_copy(update={"model_folder": str(folder)})
        module = kind.product.lower()
        python = server_python(settings.server.python, module)
        version = await asyncio.to_thread(check_installed, python, module, settings.server.python)
        port, key = free_port(), secrets.token_hex(32)  # hex: an argument must not begin with -
        own = {**kind.environment(settings), server_key.VARIABLE: key}
        line = [python, *kind.command(settings, port, release(version))]
        environment = server_environment(settings.devices, **own)
        process = ServerProcess(name, line, environment, log_file, stack.pop_all())
    address = f"http://127.0.0.1:{port}"
    keyed = settings.model_copy(update={"key": key, "is_started": True})
    made = await process.opened(
        Wire(address, kind.product, key),
        lambda: attach_server(kind, address, keyed, process),
        settings.server.start_timeout_s,
    )
    assert isinstance(made, StartedServer), "attached with a process"
    return made
