"""Frozen weights that a learner lends to samplers in other processes of its machine.

On a GPU they are handles of its memory (CUDA IPC). Without one the weights move to an anonymous
file in memory, which the borrower maps through /proc: the file has no name, so nothing remains of
it after any end of the two processes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.core.errors import InfraFailure, RunError
from pentad.ops.capture import wait_for_device
from pentad.sync.group import gpu_handle, open_gpu_handle
from pentad.sync.published import gpu_of, gpu_uuid

FILE = "pentad-base"
"""Name of the file in the list of a process's mappings."""
ALIGN = 64
OF_HANDLES = re.compile(r" (\d+) +(/dev/shm/(?:torch_|cuda\.shm\.)\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LentWeights:
    """Location of the weights; a JSON value by `asdict`. Valid while the lender lives."""

    digest: str
    """Digest of the weights, prefixed by the name of their dtype."""
    place: str
    """The UUID of the GPU; empty: the memory is a file of the lender."""
    memory: list[dict[str, Any]]
    """Handle of each separately allocated memory."""
    tensors: dict[str, list[Any]]
    """Memory, dtype, shape and first byte of each tensor, by native name."""
    files: list[list[Any]]
    """Paths and inodes of files in shared memory that torch and CUDA use for the handles: they
    remain when the lender ends."""


@dataclass(eq=False)
class Loan:
    """The lender's side: the file stays open for samplers that start later."""

    weights: LentWeights
    file: int | None = None

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


def lend(tensors: Mapping[str, Tensor], digest: str) -> Loan:
    """Lends tensors, which must stay in place from now on. Tensors in one memory arrive as views of
    one memory. On a CPU their data move to a file."""
    for name, tensor in tensors.items():
        assert tensor.is_contiguous(), f"{name} has gaps, which handles do not describe"
    device = next(iter(tensors.values())).device
    memory = {_address(tensor): tensor.untyped_storage() for tensor in tensors.values()}
    if device.type != "cuda":
        return _in_a_file(tensors, memory, digest)
    indices = {address: index for index, address in enumerate(memory)}
    described = {
        name: [indices[_address(x)], str(x.dtype)[6:], list(x.shape), _first_byte(x)]
        for name, x in tensors.items()
    }
    handles = [gpu_handle(_whole(storage)) for storage in memory.values()]
    wait_for_device(device)
    return Loan(LentWeights(digest, gpu_uuid(device), handles, described, files_of_handles()))


def _in_a_file(
    tensors: Mapping[str, Tensor], memory: dict[int, torch.UntypedStorage], digest: str
) -> Loan:
    starts, size = {}, 0
    for address, storage in memory.items():
        starts[address] = size
        size += -(-storage.nbytes() // ALIGN) * ALIGN
    described: dict[str, list[Any]] = {
        name: [0, str(x.dtype)[6:], list(x.shape), starts[_address(x)] + _first_byte(x)]
        for name, x in tensors.items()
    }
    file = os.memfd_create(FILE)
    os.ftruncate(file, size)
    flat = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8)
    while memory:  # the former memory of each is freed before the next one is copied
        address, storage = memory.popitem()
        flat[starts[address] :][: storage.nbytes()].copy_(_whole(storage))
        for name, tensor in tensors.items():
            if _address(tensor) == address:
                tensor.data = _view(flat, tensor.dtype, *described[name][2:])
    handle = {"process": os.getpid(), "file": file, "size": size}
    return Loan(LentWeights(digest, "", [handle], described, []), file)


def files_of_handles() -> list[list[Any]]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return [
        [path, inode] for path, inode in {p: int(i) for i, p in OF_HANDLES.findall(maps)}.items()
    ]


def remove_files(value: Mapping[str, Any]) -> None:
    """Removes what a lender that has ended left in shared memory. The inodes are compared, since
    containers that share the folder may use a process id twice."""
    for path, inode in LentWeights(**value).files:
        with suppress(OSError):
            if Path(path).stat().st_ino == inode:
                Path(path).unlink()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _first_byte(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _whole(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(flat: Tensor, dtype: torch.dtype, shape: list[int], at: int) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return flat[at : at + size].view(dtype).view(shape)


def open_lent(value: Mapping[str, Any]) -> dict[str, Tensor]:
    """Maps the tensors of `LentWeights` given as a JSON value. Files are mapped privately: writes
    do not reach the lender."""
    lent = LentWeights(**value)
    if lent.place:
        device = gpu_of(lent.place, "frozen weights of the learner")
        opened = [open_gpu_handle(handle, device).view(-1) for handle in lent.memory]
    else:
        opened = [_open_file(**handle) for handle in lent.memory]
    tensors = {}
    for name, (index, dtype, shape, at) in lent.tensors.items():
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise RunError(f"{name} of the learner's frozen weights has no dtype of torch: {dtype}")
        tensors[name] = _view(opened[index], kind, shape, at)
    return tensors


def _open_file(process: int, file: int, size: int) -> Tensor:
    path = f"/proc/{process:d}/fd/{file:d}"
    try:
        own = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        rule = f"the learner's frozen weights cannot be read ({error.strerror})"
        raise InfraFailure(f"{path}: {rule}") from error
    try:
        found = os.fstat(own)
        is_plain = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not is_plain or found.st_size != size:
            raise InfraFailure(f"{path}: not the learner's frozen weights; it has probably ended")
        return torch.from_file(f"/proc/self/fd/{own}", shared=False, size=size, dtype=torch.uint8)
    finally:
        os.close(own)
