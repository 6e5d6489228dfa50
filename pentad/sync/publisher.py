"""Publishing: every sampler gets all weights of the learner, verified by digest or comparison.

A snapshot is taken in the learner's program order. In place (samplers idle) it has references;
overlapped it has copies, so that training may continue during the transfer. Weights on several
ranks are written by the ranks (`shards`). Versions only grow; a snapshot is skipped if a newer one
replaces it before it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from pentad.core.errors import InfraFailure, RunError, WrongWeights
from pentad.core.roles import Installed, NativeWeights, Sampler, SentWeights, TensorPairs
from pentad.ops.digest import WeightDigest, digest_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights of one version, to be published."""

    version: int
    weights: TensorPairs
    digest: WeightDigest
    is_copy: bool = False
    """Whether the tensors are copies, to which nothing else writes."""
    gather_s: float = 0.0
    """Seconds that the learner spent on it."""

    @property
    def num_tensors(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights)


@dataclass(frozen=True, slots=True)
class LiveSnapshot(Snapshot, SentWeights):
    """The learner's own tensors, which samplers of this process compare with theirs."""


def take_snapshot(
    version: int,
    weights: Iterable[tuple[str, Tensor]],
    *,
    copy: bool,
    on_host: bool = False,
    hashed: bool = True,
) -> Snapshot:
    """Takes a snapshot in the learner's process. `copy`: needed if training continues before the
    install is done."""
    if not hashed and not copy and not on_host:
        pairs: TensorPairs
        if isinstance(weights, NativeWeights):
            pairs = weights
        else:
            pairs = tuple((name, tensor.detach()) for name, tensor in weights)
        return LiveSnapshot(version, pairs, WeightDigest(pairs))
    kept: list[tuple[str, Tensor]] = []

    def passing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            tensor = tensor.detach()
            is_moved = on_host and tensor.device.type != "cpu"
            held = tensor.cpu() if is_moved else tensor.clone() if copy else tensor
            kept.append((name, held))
            yield name, tensor  # hashed on its device, which is fast on a GPU

    digest = digest_of(passing())
    return Snapshot(version, tuple(kept), digest, is_copy=copy)


@dataclass(frozen=True, slots=True)
class PublishTimes:
    """Durations of a publish in seconds (and bytes); with several samplers those of the slowest."""

    gather: float
    """The learner's time, from the call to the snapshot."""
    transfer: float
    """From the snapshot until the sampler has received the weights, including queueing."""
    pause: float
    """Time without sampling."""
    install: float
    """From the received weights to the receipt, including the step in progress and the pause."""
    num_bytes: int = 0
    """Bytes written or sent, the largest of all samplers."""


class Publisher:
    """Installs snapshots on all samplers and checks their receipts."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self.samplers = list(samplers)
        self.version = -1
        self.times: PublishTimes | None = None
        """Durations of the last confirmed publish."""

    async def publish(self, snapshot: Snapshot) -> None:
        """Publishes a snapshot; returns when all samplers have installed it."""
        if snapshot.version < self.version:
            raise RunError(
                f"publish of version {snapshot.version} after version {self.version}: "
                "versions only grow"
            )
        started = time.monotonic()
        results = await asyncio.gather(
            *(sampler.install(snapshot.version, snapshot) for sampler in self.samplers),
            return_exceptions=True,
        )
        receipts = answered(results)
        for index, receipt in receipts:
            if receipt.num_tensors != snapshot.num_tensors:
                raise RunError(
                    f"sampler {index} wrote {receipt.num_tensors} of {snapshot.num_tensors} "
                    f"tensors of version {snapshot.version}; its policy is not the trained one"
                )
            is_same = receipt.is_same or receipt.digest == snapshot.digest.hex()
            if receipt.version != snapshot.version or not is_same:
                raise RunError(
                    f"sampler {index} holds version {receipt.version}, digest {receipt.digest}; "
                    f"the learner published version {snapshot.version} with digest "
                    f"{snapshot.digest.hex()}"
                )
        self.version = snapshot.version
        seconds = time.monotonic() - started
        install = max(receipt.install_s for _, receipt in receipts)
        pause = max(receipt.pause_s for _, receipt in receipts)
        num_bytes = max(receipt.num_bytes for _, receipt in receipts)
        transfer = max(seconds - install, 0.0)
        self.times = PublishTimes(snapshot.gather_s, transfer, pause, install, num_bytes)
        log.debug("published version %d: %s", snapshot.version, self.times)


def answered(results: Sequence[Installed | BaseException]) -> list[tuple[int, Installed]]:
    """Returns the receipts by index of the sampler, without failed samplers, which are not used
    until a later install succeeds. Raises the first failure if all failed, and always that of a
    sampler that has wrong weights and would serve them."""
    receipts = [(i, r) for i, r in enumerate(results) if isinstance(r, Installed)]
    for index, result in enumerate(results):
        if isinstance(result, BaseException):
            is_left_out = isinstance(result, RunError | InfraFailure)
            if not receipts or not is_left_out or isinstance(result, WrongWeights):
                raise result
            log.warning("sampler %d is left out until it takes new weights: %s", index, result)
    return receipts
