"""Receiving end of weight transfers in a server's worker, by file, broadcast or CUDA IPC.

Runs in the server's environment, where only modules of Pentad that need nothing but torch may be
imported. Arguments are JSON text. A call returns a receipt or {"error": ...}: an exception would
end the server's engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from pentad.sync.group import BroadcastGroup, broadcast, open_gpu_handle, weight_group

TensorStream = Iterator[tuple[str, Tensor]]
Reply = dict[str, Any]


def reports_errors(call: Callable[..., Reply]) -> Callable[..., Reply]:
    @wraps(call)
    def safe(*args: Any) -> Reply:
        try:
            return call(*args)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return safe


class Receiver:
    """Methods of a server's worker, with unique names."""

    rank: int
    device: torch.device
    pentad_group: BroadcastGroup

    def pentad_take(self, pairs: TensorStream, *, is_part: bool = False) -> Reply:
        """Loads every tensor; returns a receipt."""
        raise NotImplementedError

    @reports_errors
    def pentad_load_file(self, path: str) -> Reply:
        return self.pentad_take(read(path, self.device))

    @reports_errors
    def pentad_load_part(self, path: str) -> Reply:
        """Loads the tensors of some modules; the others keep theirs."""
        return self.pentad_take(read(path, self.device), is_part=True)

    @reports_errors
    def pentad_join(self, spec: str) -> Reply:
        """Joins a separate process group with the sender, which is rank 0."""
        wanted = json.loads(spec)
        timeout = timedelta(seconds=wanted["timeout_s"])
        rank, world = self.rank + 1, wanted["world"]
        store: dist.Store
        if "file" in wanted:
            store = dist.FileStore(wanted["file"], world)
        else:
            store = dist.TCPStore(wanted["host"], wanted["port"], world, False, timeout)
        self.pentad_group = weight_group(store, rank, world, wanted["backend"], timeout)
        return {"rank": rank}

    @reports_errors
    def pentad_receive(self, spec: str) -> Reply:
        """Receives the tensors that the sender broadcasts, in the order of `spec`."""
        return self.pentad_take(received(self.pentad_group, json.loads(spec), self.device))

    @reports_errors
    def pentad_open(self, spec: str) -> Reply:
        """Opens tensors that the sender's process shares on this worker's GPU (CUDA IPC)."""
        handles = json.loads(spec)
        mine = str(torch.cuda.get_device_properties(self.device).uuid)
        if mine not in handles:
            raise RuntimeError(
                f"the weights are on GPU {', '.join(handles)}, this worker on {mine}"
            )
        return self.pentad_take(opened(handles[mine], self.device))


def read(path: str, device: torch.device) -> TensorStream:
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
            yield name, file.get_tensor(name).to(device)


def received(
    group: BroadcastGroup, names: list[tuple[str, list[int], str]], device: torch.device
) -> TensorStream:
    for name, shape, dtype in names:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        broadcast(group, tensor)
        yield name, tensor


def opened(handles: dict[str, Any], device: torch.device) -> TensorStream:
    """Yields the opened tensors, all kept to the end: freeing one makes torch wait for the GPU."""
    yield from {n: open_gpu_handle(one, device.index or 0) for n, one in handles.items()}.items()
