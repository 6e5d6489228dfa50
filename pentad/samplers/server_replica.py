"""A server that the run started, as a process that `samplers.replica` starts again when it dies.

The newest weights are kept for it. Where they are the learner's own tensors, which it changes with
its next step, a server that starts after that step gets its first weights with the next publish.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from pentad.core.errors import FlawedAnswer, InfraFailure, RunError
from pentad.core.roles import Installed
from pentad.core.types import Generation, Request
from pentad.ops.digest import WeightDigest, digest_of
from pentad.samplers.dialect import OnToken
from pentad.samplers.process import ServerProcess
from pentad.samplers.server_sampler import ServerSampler
from pentad.sync.publisher import Snapshot

log = logging.getLogger(__name__)

POLL_S = 0.1
END_PATIENCE_S = 1.0
"""Between a call that failed and the end of its process, where that was the reason."""


@dataclass(slots=True, eq=False)
class KeptOffer:
    """Weights of one version."""

    version: int
    weights: Iterable[tuple[str, Tensor]]
    digest: WeightDigest | None
    """Of tensors that may change meanwhile."""

    def is_whole(self) -> bool:
        """Whether they are still those of the version."""
        return self.digest is None or digest_of(self.weights).hex() == self.digest.hex()


class KeptWeights:
    """The newest weights, for all servers of a run."""

    def __init__(self) -> None:
        self.newest: KeptOffer | None = None

    async def offer(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> KeptOffer:
        if self.newest is None or self.newest.weights is not weights:
            is_live = isinstance(weights, Snapshot) and not weights.is_copy
            digest = weights.digest if isinstance(weights, Snapshot) and is_live else None
            self.newest = KeptOffer(version, weights, digest)
        return self.newest

    async def settle(self, offer: KeptOffer) -> None:
        """Copies on a GPU go to host memory once a server has them: the GPU is for other things."""
        if offer is not self.newest or offer.digest is not None:
            return
        pairs = list(offer.weights)
        if any(tensor.is_cuda for _, tensor in pairs):
            moved = await asyncio.to_thread(lambda: [(name, t.cpu()) for name, t in pairs])
            if offer is self.newest:  # a publish may have come meanwhile
                self.newest = KeptOffer(offer.version, moved, None)


class ServerRemote:
    """One process of a server; done once the process has ended."""

    def __init__(self, sampler: ServerSampler, kept: KeptWeights) -> None:
        assert sampler.process is not None, "a server that the run started"
        self.sampler = sampler
        self.kept = kept
        self.process: ServerProcess = sampler.process
        self.capabilities = sampler.capabilities
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.watching = asyncio.create_task(self._watch())
        self.settling: asyncio.Task[None] | None = None
        self.abort, self.pause, self.resume = sampler.abort, sampler.pause, sampler.resume
        self.rewind, self.stats = sampler.rewind, sampler.stats
        self.sleep, self.wake, self.health = sampler.sleep, sampler.wake, sampler.health

    @property
    def version(self) -> int:
        return self.sampler.version

    async def generate(self, request: Request, on_token: OnToken | None = None) -> list[Generation]:
        try:
            return await self.sampler.generate(request, on_token)
        except InfraFailure as failure:
            if await self._has_ended():
                raise
            raise FlawedAnswer(str(failure)) from failure
        except RunError as error:
            if await self._has_ended():
                raise InfraFailure(str(error)) from error
            raise

    async def pull(self, offer: KeptOffer) -> Installed:
        if self.version < 0 and not await asyncio.to_thread(offer.is_whole):
            return await self._without_weights("was started again and has no weights yet")
        try:
            receipt = await self.install(offer.version, offer.weights)
        except InfraFailure:
            raise
        except RunError as error:
            if await asyncio.to_thread(offer.is_whole):
                raise
            return await self._without_weights(f"took weights while they changed ({error})")
        if offer.digest is not None and receipt.digest != offer.digest.hex():
            return await self._without_weights(f"took other weights than version {offer.version}")
        self.settling = asyncio.create_task(self.kept.settle(offer))
        self.settling.add_done_callback(_log_failure)
        return receipt

    async def install(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Installed:
        """Raises InfraFailure where the server has ended meanwhile."""
        try:
            return await self.sampler.install(version, weights)
        except RunError as error:
            if await self._has_ended():
                raise InfraFailure(str(error)) from error
            raise

    async def _without_weights(self, why: str) -> Installed:
        """It serves nothing until the next install, which is tried as if it were the first."""
        await self.sampler.rewind()
        self.sampler.doubt = f"{self.process.name} {why}"
        return Installed(-1, 0, "")

    async def close(self) -> None:
        self.watching.cancel()
        if self.settling is not None:
            self.settling.cancel()
        await self.sampler.close()

    async def _watch(self) -> None:
        while (ended := self.process.poll()) is None:
            await asyncio.sleep(POLL_S)
        self.lost.set_result(f"it {ended}")

    async def _has_ended(self) -> bool:
        await asyncio.wait([self.lost], timeout=END_PATIENCE_S)
        return self.lost.done()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.warning("the newest weights stay on the GPU: %r", failure)
