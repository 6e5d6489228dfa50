"""Training state in host memory while others have the device: tensors keep their identity and lose
their memory, so that modules, optimizer and views of them need not be told."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Offload:
    """The storages that were moved, and host memory for each, which is kept: pinning is slow."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rooms: dict[int, Tensor] = {}
        self.away: dict[int, torch.UntypedStorage] = {}

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Moves what lies on the device; of tensors that share memory the memory is moved once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == self.device.type and storage.nbytes():
                self.away[storage._cdata] = storage
        for key, storage in self.away.items():
            room = self.rooms.get(key)
            if room is None or room.numel() != storage.nbytes():
                pins = self.device.type == "cuda"
                room = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pins)
                self.rooms[key] = room
            room.copy_(_bytes(storage), non_blocking=True)
        self._wait()
        for storage in self.away.values():
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # a sampler may be another process

    def come_back(self) -> None:
        for key, storage in self.away.items():
            storage.resize_(self.rooms[key].numel())
            _bytes(storage).copy_(self.rooms[key], non_blocking=True)
        self._wait()
        self.away = {}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
