"""How long pieces of work took and how many bytes they moved, without waiting for the device.

On a GPU a piece lies between two events of its stream, which are read when the step is over; on a
CPU between two looks at the clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pentad.core.types import Work

_current: Meter | None = None
"""Where work is counted now. Of the process, not of a thread: autograd recomputes on its own."""


class Meter:
    """Adds up the work done while it counts, by name."""

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
        """What was counted; counts anew. On a GPU it waits for the last piece."""
        for name, start, end in self.events:
            end.synchronize()
            self.work[name].seconds += start.elapsed_time(end) / 1e3
        found = self.work
        self.reset()
        return found

    def num_items(self, name: str) -> int:
        """Counted so far."""
        return self.work[name].num_items if name in self.work else 0

    def reset(self) -> None:
        self.work, self.events = {}, []


@contextmanager
def timed(name: str, device: torch.device, num_bytes: int, num_items: int = 0) -> Iterator[None]:
    """Counts what is done within, on the current stream of the device, if anything counts."""
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
    """Says of work that is being counted that a Triton kernel did it."""
    if _current is not None and name in _current.work:
        _current.work[name].block_bytes = block_bytes
