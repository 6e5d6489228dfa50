"""Captures CUDA graphs in a process whose threads (a learner, samplers) share a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

_ALONE = threading.RLock()
"""Held during a capture, and by work on the whole device, which would end it with an error.
Reentrant: within a capture such work is torch's error, not a deadlock."""


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    pool: _POOL_HANDLE | None,
    stream: torch.cuda.Stream | None = None,
) -> Iterator[None]:
    """While active, captures the work of this thread. Other threads may use the device meanwhile,
    but wait with their own captures: torch supports one at a time in a process, and begins each by
    synchronising the device, which is an error during another."""
    with (
        _ALONE,
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        yield


def wait_for_device(device: torch.device | None = None) -> None:
    """Waits for all work of the device, after a capture of another thread."""
    with _ALONE:
        torch.cuda.synchronize(device)


def free_cached_memory() -> None:
    """Returns unused memory to the device, after a capture of another thread."""
    with _ALONE:
        torch.cuda.empty_cache()
