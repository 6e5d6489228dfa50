"""What both ends of a weight transfer share: the process group of broadcasts, and what calls mean.

The receiving end runs in a server's own environment, so this imports nothing but torch. The group
stands beside whatever default group either process has.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

PROTOCOL = 3
"""Counts the meanings that calls of vLLM's workers have had; both ends must have the same."""
DEVICE_ARGUMENT = 6
"""Where `rebuild_cuda_tensor` takes the device index."""


class BroadcastGroup(Protocol):
    """What torch's process groups and their backends have in common here."""

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> dist.Work: ...


def weight_group(
    store: dist.Store, rank: int, world: int, backend: str, timeout: timedelta
) -> BroadcastGroup:
    """`backend` is gloo or nccl; returns when all have come."""
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)  # type: ignore[return-value]
    return dist.ProcessGroupGloo(store, rank, world, timeout)  # type: ignore[return-value]


def broadcast(group: BroadcastGroup, tensor: Tensor) -> None:
    """From rank 0; waits until this rank's part is done."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def send_all(group: BroadcastGroup, weights: Iterable[tuple[str, Tensor]]) -> None:
    for _, tensor in weights:
        broadcast(group, tensor.detach().contiguous())
