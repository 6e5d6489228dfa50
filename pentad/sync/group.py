"""Common parts of both ends of a weight transfer: the process group of broadcasts, handles of
tensors on a GPU for another process, and the protocol version.

The receiving end runs in the server's environment, so this imports only torch. The group is
independent of the default group of either process.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

PROTOCOL = 4
"""Protocol version of the calls to vLLM's workers; must be equal on both ends."""
DEVICE_ARGUMENT = 6
"""Position of the device index in the arguments of `rebuild_cuda_tensor`."""


class BroadcastGroup(Protocol):
    """The common interface of torch's process groups and their backends."""

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> dist.Work: ...


def weight_group(
    store: dist.Store, rank: int, world: int, backend: str, timeout: timedelta
) -> BroadcastGroup:
    """Joins the group; `backend` is gloo or nccl. Returns when all have joined."""
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)  # type: ignore[return-value]
    return dist.ProcessGroupGloo(store, rank, world, timeout)  # type: ignore[return-value]


def broadcast(group: BroadcastGroup, tensor: Tensor) -> None:
    """Broadcasts from rank 0; returns when this rank's part is done."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    if tensor.dtype.itemsize == 1:  # gloo has no fp8
        tensor = tensor.view(torch.uint8)
    group.broadcast([tensor], options).wait()


def send_all(group: BroadcastGroup, weights: Iterable[tuple[str, Tensor]]) -> None:
    for _, tensor in weights:
        broadcast(group, tensor.detach().contiguous())


# Handles of GPU tensors for another process: JSON values, nothing is unpickled.

HANDLE = (str, int, int, bool, str, int, str, bool)
"""Types of the arguments of `rebuild_cuda_tensor` after the device; bytes as base64."""
MAX_HANDLE_BYTES = 1 << 12


def gpu_handle(tensor: Tensor) -> dict[str, Any]:
    """Returns the handle of a tensor, which must stay alive until the receiver has read it."""
    assert tensor.is_cuda and tensor.is_contiguous(), "only contiguous GPU tensors can be shared"
    _, arguments = reduce_tensor(tensor)
    return {
        "dtype": str(tensor.dtype)[6:],
        "shape": list(tensor.shape),
        "offset": arguments[3],
        "handle": [
            base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for value in arguments[DEVICE_ARGUMENT + 1 :]
        ],
    }


def open_gpu_handle(value: Mapping[str, Any], device: int) -> Tensor:
    """Opens the sender's memory; `device`: the GPU's index in this process. ValueError for an
    invalid handle."""
    fields = checked_handle(value)
    shape, stride = torch.Size(value["shape"]), strides(value["shape"])
    dtype, storage = getattr(torch, value["dtype"]), torch.storage.TypedStorage
    tensor: Tensor = rebuild_cuda_tensor(
        Tensor, shape, stride, value["offset"], storage, dtype, device, *fields
    )
    return tensor


def checked_handle(value: Mapping[str, Any]) -> list[Any]:
    """Returns the validated fields of the handle, with base64 decoded."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "offset", "handle"}:
        raise ValueError("a handle has a dtype, a shape, an offset and the fields of its memory")
    dtype = getattr(torch, value["dtype"], None) if isinstance(value["dtype"], str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype = {value['dtype']!r} is not a dtype of torch")
    shape, fields = value["shape"], value["handle"]
    counts = [*shape, value["offset"]] if isinstance(shape, list) else [None]
    if any(type(count) is not int or not 0 <= count < 1 << 48 for count in counts):
        raise ValueError(f"shape = {shape!r} and offset = {value['offset']!r} are no counts")
    if not isinstance(fields, list) or tuple(map(type, fields)) != HANDLE:
        raise ValueError("the fields of the memory have other types than torch gives them")
    if any(type(field) is int and not 0 <= field < 1 << 48 for field in fields):
        raise ValueError("a field of the memory is no count")
    if any(type(field) is str and len(field) > MAX_HANDLE_BYTES for field in fields):
        raise ValueError(f"a field of the memory is longer than {MAX_HANDLE_BYTES}")
    if (value["offset"] + math.prod(shape)) * dtype.itemsize > fields[1]:
        raise ValueError(f"shape = {shape} reaches beyond the {fields[1]} bytes of its memory")
    return [base64.b64decode(f, validate=True) if isinstance(f, str) else f for f in fields]


def strides(shape: list[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
