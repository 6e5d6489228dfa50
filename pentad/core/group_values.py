"""Exchanges plain values between ranks of a process group, as JSON, never by pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

OptionalGroup = dist.ProcessGroup | None
"""A process group with a backend for CPU tensors; None: the default group."""


def broadcast_value(value: Any, group: OptionalGroup) -> Any:
    """Returns rank 0's value on every rank of the group; other ranks pass None."""
    is_source = dist.get_rank(group) == 0
    data = _packed(value) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, group=group, group_src=0)
    if not is_source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return value if is_source else _unpacked(data)


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
