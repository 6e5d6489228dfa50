"""Published weights: a folder of safetensors files, or one such file in GPU memory.

Kinds: `shm` (a folder in shared memory), `file` (a folder that all machines see), `ipc` (a buffer
on a GPU that both processes use). A folder of kind `file` has a file with the tensors that changed
since the previous version, and links to files of earlier versions for the others; its index names
the file of every tensor.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pentad.core.errors import InfraFailure, Problem, RunError, UserError
from pentad.core.roles import TensorPairs
from pentad.ops.capture import wait_for_device
from pentad.sync.group import gpu_handle, open_gpu_handle
from pentad.weights.files import read_header
from pentad.weights.hf import FileLayout
from pentad.weights.transfer import TensorInfo

Kind = Literal["shm", "file", "ipc"]
ALIGN = 64
WEIGHTS = "model.safetensors"
INDEX = "index.json"
WRITING = "writing"
WAIT_S = 0.001, 0.05
"""Shortest and longest interval of polling for a complete file, in seconds."""
Own = Callable[[set[str]], Mapping[str, Tensor]]
"""Returns the receiver's own tensors of these names."""


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Location of the weights of one version; a JSON value by `asdict`.

    Example: PublishedWeights(3, "5f0c...", "shm", "/dev/shm/x/3-0", 12, 4096)
    """

    version: int
    digest: str
    """The digest of all tensors, with their names."""
    kind: Kind
    place: str
    """The folder, or the UUID of the GPU."""
    num_tensors: int
    num_bytes: int
    """Number of bytes written for this version."""
    handle: dict[str, Any] = field(default_factory=dict)
    """Opens the buffer on the GPU; empty for a folder."""
    writers: tuple[int, ...] = ()
    """Ranks that write in the background; each puts a marker file in the folder."""

    def remove(self) -> None:
        """Removes the files; memory mappings stay valid."""
        if self.kind != "ipc":
            shutil.rmtree(self.place, ignore_errors=True)


def by_width(infos: Mapping[str, TensorInfo]) -> FileLayout:
    """Returns a file layout in which every tensor is aligned to its item size; tensors whose size
    is no multiple of a word come last."""
    order = sorted(infos, key=lambda n: (-infos[n].dtype.itemsize, infos[n].size_bytes % 4 != 0))
    return FileLayout({name: infos[name] for name in order}, ALIGN)


def infos_of(pairs: TensorPairs) -> dict[str, TensorInfo]:
    found = {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in pairs}
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(Problem(twice, "given twice"))
    return found


class FilePairs(list[tuple[str, Tensor]]):
    """The tensors of one file."""

    def __init__(self, file: Path, pairs: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(pairs)
        self.file = file


def mark_of(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's marker file: it has WRITING, then nothing, or the reason of a
    failure."""
    return folder / f"rank-{rank}"


async def wait_written(
    published: PublishedWeights, check: Callable[[], None] = lambda: None
) -> None:
    """Waits until every rank has written its part; RunError with the reason if one failed. `check`:
    raises if the ranks are lost."""
    pause, longest = WAIT_S
    for rank in published.writers:
        while (said := read_mark(mark_of(Path(published.place), rank))) == WRITING:
            check()
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, longest)
        if said:
            raise RunError(said)


def read_mark(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        rule = f"the state of the weights cannot be read ({error.strerror})"
        raise InfraFailure(f"{path}: {rule}") from error


# Files.


def reserve(file: int, size: int) -> None:
    """Reserves disk space for the bytes; only sets the size if the system cannot (macOS)."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def make_file(path: Path, layout: FileLayout) -> Tensor:
    """Makes a file with its header in a new folder; returns its memory."""
    size = layout.num_bytes
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:  # reserve first: a missing page of shared memory would kill the process
            reserve(file, size)
            os.write(file, layout.header)
        finally:
            os.close(file)
    except OSError as error:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise RunError(no_room(path.parent, size, error)) from error
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def no_room(folder: Path, size: int, error: OSError) -> str:
    rule = f"{folder.parent}: weights of {size} bytes cannot be written ({error.strerror})"
    return f"{rule}; make room in it"


def write_pairs(version: int, pairs: TensorPairs, digest: str, folder: Path) -> PublishedWeights:
    """Writes whole tensors of this process to shared memory."""
    layout = by_width(infos_of(pairs))
    copy_pairs(layout.views(make_file(folder / WEIGHTS, layout)), pairs)
    return PublishedWeights(version, digest, "shm", str(folder), len(pairs), layout.num_bytes)


def copy_pairs(into: Mapping[str, Tensor], pairs: TensorPairs) -> None:
    torch._foreach_copy_([into[name] for name, _ in pairs], [x for _, x in pairs])


def map_file(path: Path) -> dict[str, Tensor]:
    """Maps a file; returns views of its tensors, which stay valid after the file is removed."""
    try:
        size = path.stat().st_size
    except OSError as error:
        rule = f"published weights cannot be read ({error.strerror})"
        raise InfraFailure(f"{path}: {rule}") from error
    if not size:
        raise RunError(f"{path}: published weights have no bytes")
    return views(torch.from_file(str(path), False, size, dtype=torch.uint8), str(path))


def views(flat: Tensor, where: str) -> dict[str, Tensor]:
    """Returns views of the tensors in the bytes of a safetensors file, in any memory."""
    length = int.from_bytes(flat[:8].cpu().numpy().tobytes(), "little")
    head = flat[: 8 + min(length, flat.numel())].cpu().numpy().tobytes()
    try:
        infos, starts = read_header(io.BytesIO(head), flat.numel(), where)
    except UserError as error:
        raise RunError(str(error)) from error
    return {
        name: flat[starts[name] : starts[name] + info.size_bytes].view(info.dtype).view(info.shape)
        for name, info in infos.items()
    }


def read_folder(folder: Path, held: tuple[int, str], own: Own) -> list[tuple[str, Tensor]]:
    """Returns all tensors of a folder with an index. A receiver that has the base version reads
    only the new file."""
    index = json.loads(read_mark(folder / INDEX))
    files: dict[str, str] = index["weight_map"]
    same = {name for name, file in files.items() if file != index["newest"]}
    found = dict(own(same)) if tuple(index["base"]) == held else {}
    mapped: dict[str, dict[str, Tensor]] = {}
    pairs = []
    for name, file in files.items():
        if name not in found:
            if file not in mapped:
                mapped[file] = map_file(folder / file)
            if name not in mapped[file]:
                raise RunError(f"{folder / file}: {name} is missing, although the index names it")
        pairs.append((name, found[name] if name in found else mapped[file][name]))
    is_whole = len(mapped) == 1 and not same
    return FilePairs(folder / index["newest"], pairs) if is_whole else pairs


# A buffer on a GPU.


def gpu_uuid(device: torch.device | int) -> str:
    """Returns the UUID of a GPU, which is equal in all processes, unlike its index."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpu_of(uuid: str, what: str) -> int:
    """Returns the index of a GPU in this process; RunError if it is not one of its GPUs."""
    for index in range(torch.cuda.device_count()):
        if gpu_uuid(index) == uuid:
            return index
    raise RunError(f"{what} lie on {uuid}, not on our GPU")


def make_buffer(layout: FileLayout, device: torch.device) -> Tensor:
    """Makes a GPU buffer for a safetensors file, with its header."""
    flat = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    flat[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    return flat


def share_on_gpu(version: int, flat: Tensor, num_tensors: int, digest: str) -> PublishedWeights:
    """Returns the location of a buffer, which must stay alive until all receipts have arrived."""
    handle = gpu_handle(flat)
    wait_for_device(flat.device)
    place = gpu_uuid(flat.device)
    return PublishedWeights(version, digest, "ipc", place, num_tensors, flat.numel(), handle)


def open_on_gpu(published: PublishedWeights) -> dict[str, Tensor]:
    """Maps the publisher's memory: read-only, and only until the receipt is sent."""
    what = f"weights of version {published.version}"
    opened = open_gpu_handle(published.handle, gpu_of(published.place, what))
    return views(opened, f"{what} on {published.place}")


def open_weights(
    value: Mapping[str, Any], held: tuple[int, str] = (-1, ""), own: Own = lambda names: {}
) -> list[tuple[str, Tensor]]:
    """Opens the tensors of `PublishedWeights` given as a JSON value. `held`: version and digest of
    the receiver's weights; `own`: returns its tensors."""
    published = PublishedWeights(**value)
    if published.kind == "ipc":
        return list(open_on_gpu(published).items())
    folder = Path(published.place)
    if published.kind == "shm":
        return FilePairs(folder / WEIGHTS, map_file(folder / WEIGHTS).items())
    return read_folder(folder, held, own)
