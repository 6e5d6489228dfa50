"""Host memory that devices copy to quickly and that a writer process maps: pinned if it can be."""

from __future__ import annotations

import logging

import torch

from pentad.checkpoint.job import Memory
from pentad.core.machine import GIB

log = logging.getLogger(__name__)


class StagingMemory:
    """Made once and kept: pinning a GiB takes longer than copying it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = Memory(size)
        self.tensor = torch.frombuffer(self.memory.view, dtype=torch.uint8)
        if device.type == "cuda":
            code = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), size, 0))
            if code:  # copies work all the same
                text = "%.3g GiB of host memory could not be pinned (CUDA error %d): saves stall"
                log.warning(f"{text} the run for longer", size / GIB, code)
