"""A sampler in another process, as `core.roles.Sampler` over a connection to its host.

Weights are pulled by ticket (`sync.handoff`); the receipt must say what the ticket does. Once the
connection is lost the object is done: `samplers.replica` makes another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from pentad.core.errors import InfraFailure, RunError, WrongWeights
from pentad.core.roles import Installed, NamedTensors
from pentad.core.types import Generation, Request
from pentad.runtime import roles
from pentad.runtime.roles import RoleProcess
from pentad.runtime.wire import Connection
from pentad.samplers.hosted import generations_of, pack_request
from pentad.sync.handoff import Handoff, Offer

OnToken = Callable[[int, int, float], None]


class RemoteSampler:
    def __init__(self, process: RoleProcess, handoff: Handoff) -> None:
        self.process = process
        self.handoff = handoff
        self.capabilities: frozenset[str] = frozenset()
        self.version = -1
        self.seen: dict[str, float] = {}
        self.listeners: dict[str, tuple[OnToken, asyncio.Future[Any]]] = {}
        self.is_closed = False
        self.connection: Connection | None = None

    @classmethod
    async def open(
        cls, process: RoleProcess, handoff: Handoff, *, patience_s: float | None = None
    ) -> RemoteSampler:
        """Once the sampler is made there. Raises what kept it from being made."""
        sampler = cls(process, handoff)
        sampler.connection = await roles.connect(
            process, sampler._hear, patience_s=patience_s or roles.PATIENCE_S
        )
        try:
            hello = await sampler._call("hello")
        except BaseException:
            await sampler.close()
            raise
        sampler.capabilities = frozenset(hello["capabilities"])
        sampler.version, sampler.seen = hello["version"], hello["stats"]
        return sampler

    @property
    def lost(self) -> asyncio.Future[str]:
        """Why there is no connection any more, once there is none."""
        assert self.connection is not None, "opened by `open`"
        return self.connection.lost

    async def generate(self, request: Request, on_token: OnToken | None = None) -> list[Generation]:
        call = asyncio.ensure_future(
            self._call("generate", request=pack_request(request), is_heard=on_token is not None)
        )
        if on_token is not None:
            self.listeners[request.id] = on_token, asyncio.get_running_loop().create_future()
        try:
            if on_token is not None:
                fault = self.listeners[request.id][1]
                await asyncio.wait([call, fault], return_when=asyncio.FIRST_COMPLETED)
                if fault.done():  # the listener's own: its request alone ends
                    raise fault.result()
            answer = await call
        finally:
            call.cancel()
            self.listeners.pop(request.id, None)
        self.seen = answer["stats"]
        return generations_of(answer["generations"])

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id=request_id)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def rewind(self) -> None:
        await self._call("rewind")
        self.version = -1

    async def install(self, version: int, weights: NamedTensors) -> Installed:
        self._check_open()
        return await self.pull(await self.handoff.offer(version, weights))

    async def pull(self, offer: Offer) -> Installed:
        """Raises WrongWeights where the sampler ends with something else than what is offered."""
        with self.handoff.reading(offer) as ticket:
            receipt = Installed(**await self._call("pull", ticket=asdict(ticket)))
        if (receipt.version, receipt.digest) != (ticket.version, ticket.digest):
            raise WrongWeights(
                f"{self.process.name} holds version {receipt.version}, digest {receipt.digest}, "
                f"after it was handed version {ticket.version} with digest {ticket.digest}"
            )
        self.version = receipt.version
        return replace(receipt, num_bytes=ticket.num_bytes)

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> None:
        await self._call("wake")

    async def health(self) -> None:
        await self._call("health")

    def stats(self) -> dict[str, float]:
        return self.seen

    async def close(self) -> None:
        """Open requests end with an error; the process is gone when this returns."""
        self.is_closed = True
        if self.connection is not None:
            await self.connection.close("the sampler was closed")
        self.process.kill()

    async def _call(self, method: str, **arguments: Any) -> Any:
        self._check_open()
        assert self.connection is not None, "opened by `open`"
        try:
            return await self.connection.call(method, **arguments)
        except InfraFailure as failure:
            if self.is_closed:
                raise RunError("the sampler was closed") from failure
            raise

    def _check_open(self) -> None:
        if self.is_closed:
            raise RunError("the sampler is closed")

    def _hear(self, event: str, value: Any) -> None:
        if event == "beat":
            self.seen = value or self.seen
            return
        request_id, index, id_, logprob = value
        if listener := self.listeners.get(request_id):
            on_token, fault = listener
            try:
                on_token(index, id_, logprob)
            except Exception as error:
                if not fault.done():
                    fault.set_result(error)
