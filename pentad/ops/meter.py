"""Measures duration and bytes moved of operations, without device synchronization.

On a GPU an operation is timed by two CUDA events, which are read after the step; on a CPU by the
clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pentad.core.types import Work

_current: Meter | None = None
"""The active meter. One per process, since autograd recomputes in its own threads."""


class Meter:
    """Accumulates the measured work by name while active."""

    def __init__(self) -> None:
        self.work: dict[str, Work] = {}
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def counting(self) -> Iterator[None]:
        global _current
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before

    def take(self) -> dict[str, Work]:
        """Returns the counts and resets them. On a GPU it waits for the last operation."""
        for name, start, end in self.events:
            end.synchronize()
            self.work[name].seconds += start.elapsed_time(end) / 1e3
        found = self.work
        self.reset()
        return found

    def num_items(self, name: str) -> int:
        """Number of items counted so far."""
        return self.work[name].num_items if name in self.work else 0

    def reset(self) -> None:
        self.work, self.events = {}, []


@contextmanager
def timed(name: str, device: torch.device, num_bytes: int, num_items: int = 0) -> Iterator[None]:
    """Measures the work inside, on the device's current stream, if a meter is active."""
    meter = _current
    if meter is None:
        yield
        return
    work = meter.work.setdefault(name, Work())
    work.num_bytes += num_bytes
    work.num_items += num_items
    work.num_calls += 1
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        meter.events.append((name, start, end))
        return
    began = time.perf_counter()
    yield
    work.seconds += time.perf_counter() - began


def note_kernel(name: str, block_bytes: int) -> None:
    """Records that the measured operation ran as a Triton kernel."""
    if _current is not None and name in _current.work:
        _current.work[name].block_bytes = block_bytes
