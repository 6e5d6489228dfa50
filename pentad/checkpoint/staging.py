"""Host memory that state is copied to before it is written: kept for the run, pinned for a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from pentad.checkpoint.job import Memory
from pentad.core.errors import RunError

log = logging.getLogger(__name__)

ALIGN = 64
"""Where a tensor begins: a multiple of every item size."""
ROOM = 1 << 20
"""Sizes are rounded up to this, so that a little more state does not need new memory."""


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class HostMemory:
    """One buffer that a writer process can map. Making it takes seconds per 10 GB, which a thread
    spends while the run goes on."""

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.is_pinned = False
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None

    def prepare(self, size: int, *, pins: bool) -> None:
        """Begins to make room; returns at once."""
        self._wait()
        if self.memory is None or self.memory.size < size:
            self.close()
            device = torch.cuda.current_device() if pins else None
            self.thread = threading.Thread(target=self._make, args=(size, device), daemon=True)
            self.thread.start()

    def take(self, size: int, *, pins: bool) -> Memory:
        """At least so many bytes, whose last content nobody needs any more."""
        self.prepare(size, pins=pins)
        self._wait()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise RunError(f"no host memory to stage {size / 1e9:.1f} GB of state ({failure})")
        assert self.memory is not None
        return self.memory

    def close(self) -> None:
        self._wait()
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.is_pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def _wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _make(self, size: int, device: int | None) -> None:
        try:
            self.memory = Memory(-(-max(size, 1) // ROOM) * ROOM)
            self.bytes = torch.frombuffer(self.memory.view, dtype=torch.uint8)
            self.bytes.zero_()  # pages are given when they are first written
            if device is not None:
                torch.cuda.set_device(device)
                where, num = self.bytes.data_ptr(), self.bytes.numel()
                self.is_pinned = int(torch.cuda.cudart().cudaHostRegister(where, num, 0)) == 0
                if not self.is_pinned:
                    text = "%.1f GB of host memory cannot be pinned: saves hold training up longer"
                    log.warning(text, num / 1e9)
        except (OSError, RuntimeError, MemoryError) as error:
            self.failure = error


@torch.no_grad()
def copy_to(memory: Tensor, tensors: Iterable[tuple[int, Tensor]]) -> None:
    """Each (start, tensor) into the bytes; on return the tensors may change."""
    devices = set()
    for start, tensor in tensors:
        room = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            devices.add(tensor.device)
    for device in devices:
        torch.cuda.synchronize(device)
