"""Exchanges plain values between ranks of a process group, as JSON, never by pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

OptionalGroup = dist.ProcessGroup | None
"""A process group with a backend for CPU tensors; None: the default group."""


def gather_values(value: Any, group: OptionalGroup = None) -> list[Any]:
    """Returns the values of all ranks, in rank order, on every rank."""
    data, world = _packed(value), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    room = max(int(size) for size in sizes)
    padded = torch.zeros(room, dtype=torch.uint8)
    padded[: data.numel()] = data
    found = [torch.empty(room, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(found, padded, group=group)
    return [_unpacked(one[: int(size)]) for one, size in zip(found, sizes, strict=True)]


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
