"""Reads torch.distributed.checkpoint (DCP) folders: any block of any tensor, with threads.

`.metadata` lists the blocks of each tensor in the `.distcp` files; each block is a torch file.
Blocks may have any boundaries. If the bytes before a block's data are as this torch version writes
them, only the needed byte ranges are read; otherwise torch reads the whole block.
"""

from __future__ import annotations

import io
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import skip_data

from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.machine import num_cores
from pentad.weights.megatron.layout import INDEX
from pentad.weights.pickles import load_metadata, load_tensor
from pentad.weights.regions import Box, Shape, box_shape, full_box, intersect, show, within
from pentad.weights.transfer import NUM_READERS, TensorInfo

CACHE_BYTES = 256 << 20
"""Bytes of cached blocks: one block may contain several fused HF tensors."""
STRETCH_BYTES = 32 << 20
"""Bytes that a thread reads at once if there are no checksummed pieces."""
MAX_READERS = 16
"""Maximum number of threads that read, check and copy."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One stored block of a tensor."""

    box: Box
    file: str
    start: int
    length: int


class Verifier(Protocol):
    """Interface to the checksums of the files of a folder."""

    def pieces(self, file: str) -> Sequence[tuple[int, int]]:
        """(offset, length) of the ranges that have checksums, in order and without gaps."""
        ...

    def check(self, file: str, offset: int, length: int, data: memoryview) -> None:
        """Raises if the data differ from the checksum of that range."""
        ...


@dataclass(frozen=True, slots=True)
class Demand:
    """A block of a stored tensor to read, and the memory to fill, in the order of the block."""

    name: str
    box: Box
    out: Tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes that `torch.save` writes before and after the data of a contiguous tensor."""

    before: bytes
    after: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.before) + len(self.after)


class _Gap(io.BytesIO):
    """A file object that discards skipped ranges and keeps the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [bytearray()]

    def write(self, data: Any) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR and len(self.parts) == 1, "torch.save skips the numbers once"
        self.parts.append(bytearray())
        return 0


@lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, shape: Shape) -> Frame:
    """The `Frame` of a CPU tensor. Its memory is never touched, so its size does not matter."""
    out = _Gap()
    with skip_data():
        torch.save(torch.empty(shape, dtype=dtype, device="cpu"), out)
    return Frame(bytes(out.parts[0]), b"".join(map(bytes, out.parts[1:])))


def flat_boxes(start: int, stop: int, shape: Shape) -> Iterator[tuple[int, Box]]:
    """Splits elements [start, stop) of a flattened tensor into boxes, each with the flat index of
    its first element."""
    if start >= stop:
        return
    if not shape:
        yield start, ()
        return
    row, rest = math.prod(shape[1:]), shape[1:]
    first, last = start // row, stop // row
    if start % row:
        end = min(stop - first * row, row)
        for at, box in flat_boxes(start % row, end, rest):
            yield first * row + at, ((first, first + 1), *box)
        first += 1
    if first < last:
        yield first * row, ((first, last), *full_box(rest))
    if stop % row and last >= first:
        for at, box in flat_boxes(0, stop % row, rest):
            yield last * row + at, ((last, last + 1), *box)


class DcpFolder:
    """Reader of the tensors of a DCP folder by name; `is_wanted` filters names."""

    def __init__(
        self,
        folder: Path,
        is_wanted: Callable[[str], bool] = lambda name: True,
        verifier: Verifier | None = None,
        index: bytes | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """Opens the folder; `index` and `sizes` are its metadata and file sizes, if known."""
        self.folder = folder
        self.where = str(folder)
        self.verifier = verifier
        metadata = load_metadata(folder / INDEX, index)
        self.infos: dict[str, TensorInfo] = {}
        self.blocks: dict[str, list[StoredBlock]] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, dcp.TensorStorageMetadata) and is_wanted(name):
                self.infos[name] = TensorInfo(tuple(entry.size), entry.properties.dtype)
                self.blocks[name] = self._blocks(name, entry, metadata.storage_data)
        self._check_blocks()
        self._check_files(sizes)
        self.cache: OrderedDict[StoredBlock, Tensor] = OrderedDict()

    def _blocks(
        self, name: str, entry: dcp.TensorStorageMetadata, storage: Mapping[Any, Any]
    ) -> list[StoredBlock]:
        out: dict[Box, StoredBlock] = {}
        for chunk in entry.chunks:
            info = storage.get(dcp.MetadataIndex(name, chunk.offsets))
            if not isinstance(info, _StorageInfo):
                rule = f"its block at {list(chunk.offsets)} is in no file"
                raise UserError(Problem(f"{self.where}/{INDEX}: {name}", rule))
            if vars(info).get("transform_descriptors"):
                rule = f"{info.relative_path} is stored through {info.transform_descriptors}"
                raise UserError(Problem(f"{self.where}: {name}", rule, "save it uncompressed"))
            if Path(info.relative_path).name != info.relative_path:
                rule = f"{info.relative_path} is not a file of this folder"
                raise UserError(Problem(f"{self.where}/{INDEX}: {name}", rule))
            ends = zip(chunk.offsets, chunk.sizes, strict=True)
            box = tuple((start, start + size) for start, size in ends)
            out[box] = StoredBlock(box, info.relative_path, info.offset, info.length)
        return list(out.values())

    def _check_blocks(self) -> None:
        """Raises unless the stored blocks cover every element of each tensor."""
        problems = []
        for name, info in self.infos.items():
            held = sum(math.prod(box_shape(block.box)) for block in self.blocks[name])
            lacking = math.prod(info.shape) - held
            if lacking:
                rule = f"{lacking} of {math.prod(info.shape)} elements are in no file"
                problems.append(Problem(f"{self.where}: {name}", rule, "fetch the folder again"))
        raise_problems(problems)

    def _check_files(self, sizes: Mapping[str, int] | None) -> None:
        ends: dict[str, int] = {}
        for block in (block for blocks in self.blocks.values() for block in blocks):
            ends[block.file] = max(ends.get(block.file, 0), block.start + block.length)
        problems = []
        for name, end in sorted(ends.items()):
            path = self.folder / name
            size = _size(path) if sizes is None else sizes.get(name)
            if size is None:
                rule = f"missing, but {INDEX} puts weights in it"
                problems.append(Problem(str(path), rule, "fetch the file again"))
            elif size < end:
                rule = f"has {size} bytes, but {INDEX} needs {end}"
                problems.append(Problem(str(path), rule, "fetch or write the file again"))
        raise_problems(problems)

    # Reading single blocks, with a cache

    def read(self, name: str, box: Box) -> Tensor:
        hits = self._hits(name, box)
        if len(hits) == 1 and hits[0][1] == box:
            return self._open(name, hits[0][0])[within(box, hits[0][0].box)]
        out = torch.empty(box_shape(box), dtype=self.infos[name].dtype)
        for block, inside in hits:
            part = self._open(name, block)[within(inside, block.box)]
            out[within(inside, box)] = part
        return out

    def _hits(self, name: str, box: Box) -> list[tuple[StoredBlock, Box]]:
        """The stored blocks that overlap the box, each with the overlap."""
        both = [(block, intersect(block.box, box)) for block in self.blocks[name]]
        hits = [(block, inside) for block, inside in both if inside is not None]
        found = sum(math.prod(box_shape(inside)) for _, inside in hits)
        if found != math.prod(box_shape(box)):
            rule = f"the blocks in its files do not make up {show(box)}"
            raise UserError(Problem(f"{self.where}: {name}", rule, "fetch the folder again"))
        return hits

    def _open(self, name: str, block: StoredBlock) -> Tensor:
        if block in self.cache:
            self.cache.move_to_end(block)
            return self.cache[block]
        tensor = self.cache[block] = self._load(name, block)
        while len(self.cache) > 1 and sum(t.nbytes for t in self.cache.values()) > CACHE_BYTES:
            self.cache.popitem(last=False)
        return tensor

    def _load(self, name: str, block: StoredBlock) -> Tensor:
        if self.verifier is not None:
            with (self.folder / block.file).open("rb") as file:
                for offset, length in _over(self.verifier.pieces(block.file), block):
                    data = memoryview(bytearray(length))
                    self._fill(file.fileno(), block.file, offset, data)
                    self.verifier.check(block.file, offset, length, data)
        tensor = load_tensor(self.folder / block.file, block.start, block.length)
        info, shape = self.infos[name], box_shape(block.box)
        if tuple(tensor.shape) != shape or tensor.dtype != info.dtype:
            rule = f"{block.file} holds {tensor.dtype} {list(tensor.shape)}, {INDEX} says "
            rule += f"{info.dtype} {list(shape)}"
            raise UserError(Problem(f"{self.where}: {name}", rule, "fetch the checkpoint again"))
        return tensor

    def _fill(self, fd: int, file: str, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            count = os.preadv(fd, [data[done:]], offset + done)
            if not count:
                rule = f"ends before byte {offset + len(data)}"
                raise UserError(Problem(str(self.folder / file), rule, "fetch the file again"))
            done += count

    # Reading all tensors

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        self.read_all([Demand(name, box, out)])

    @torch.no_grad()
    def read_all(self, demands: Iterable[Demand]) -> None:
        """Fills the memory of all demands, in file order. Each byte range of a file is read once,
        verified if there is a verifier, and copied to all tensors that need it."""
        wanted: dict[StoredBlock, tuple[str, list[tuple[Box, Tensor]]]] = {}
        for demand in demands:
            if not demand.out.numel():
                continue
            for block, inside in self._hits(demand.name, demand.box):
                part = demand.out[within(inside, demand.box)]
                wanted.setdefault(block, (demand.name, []))[1].append((inside, part))
        order = sorted(wanted, key=lambda block: (block.file, block.start))
        outs = [part for _, parts in wanted.values() for _, part in parts]
        buffers = _Buffers(next((out.device for out in outs if out.is_cuda), None))
        with ExitStack() as stack:
            files = {
                name: stack.enter_context((self.folder / name).open("rb")).fileno()
                for name in {block.file for block in order}
            }
            jobs = [
                job
                for block in order
                for job in self._jobs(*wanted[block], block, files[block.file], buffers)
            ]
            _run_all(jobs)

    def _jobs(
        self,
        name: str,
        parts: list[tuple[Box, Tensor]],
        block: StoredBlock,
        fd: int,
        buffers: _Buffers,
    ) -> Iterator[Callable[[], None]]:
        """One read job for each byte range of the block that contains demanded elements."""
        dtype, shape = self.infos[name].dtype, box_shape(block.box)
        frame, size = frame_of(dtype, shape), math.prod(shape) * dtype.itemsize
        stretches = (
            list(_over(self.verifier.pieces(block.file), block))
            if self.verifier is not None
            else list(_cut(block.start, block.length))
        )
        zero = block.start + len(frame.before)
        ends = {end for stretch in stretches for end in (stretch[0], sum(stretch))}
        is_plain = (
            block.length == size + frame.size_bytes
            and (min(ends), max(ends)) == (block.start, block.start + block.length)
            and not any((end - zero) % dtype.itemsize for end in ends if zero < end < zero + size)
            and self._bytes(fd, block.file, block.start, len(frame.before)) == frame.before
        )
        if not is_plain:
            yield partial(self._read_whole, name, parts, block)
            return
        for offset, length in stretches:
            first = max(0, offset - zero) // dtype.itemsize
            last = min(size, max(0, offset + length - zero)) // dtype.itemsize
            copies = list(_copies(first, last, block.box, parts))
            if copies:
                yield partial(
                    self._read_stretch, fd, block.file, offset, length, zero, dtype, copies, buffers
                )

    def _bytes(self, fd: int, file: str, offset: int, length: int) -> bytes:
        data = bytearray(length)
        self._fill(fd, file, offset, memoryview(data))
        return bytes(data)

    def _read_whole(self, name: str, parts: list[tuple[Box, Tensor]], block: StoredBlock) -> None:
        tensor = self._load(name, block)
        for box, out in parts:
            out.copy_(tensor[within(box, block.box)])

    def _read_stretch(
        self,
        fd: int,
        file: str,
        offset: int,
        length: int,
        zero: int,
        dtype: torch.dtype,
        copies: list[Copy],
        buffers: _Buffers,
    ) -> None:
        buffer = buffers.take(length)
        data = buffer.numpy().data
        self._fill(fd, file, offset, data)
        if self.verifier is not None:
            self.verifier.check(file, offset, length, data)
        for place, shape, index, out in copies:
            start = zero + place * dtype.itemsize - offset
            stop = start + math.prod(shape) * dtype.itemsize
            numbers = buffer[start:stop].view(dtype).view(shape)
            out.copy_(numbers[index], non_blocking=True)
        if buffers.device is not None:  # before the buffer is reused
            torch.cuda.current_stream(buffers.device).synchronize()


Copy = tuple[int, Shape, tuple[slice, ...], Tensor]
"""(offset of a box's first element in its block, shape of the box, slices of it, target)."""


def _copies(first: int, last: int, whole: Box, parts: list[tuple[Box, Tensor]]) -> Iterator[Copy]:
    """The copies from elements [first, last) of a block to the demanded boxes."""
    for place, local in flat_boxes(first, last, box_shape(whole)):
        box = tuple(
            (start + zero, stop + zero)
            for (start, stop), (zero, _) in zip(local, whole, strict=True)
        )
        for wanted, out in parts:
            inside = intersect(box, wanted)
            if inside is not None:
                yield place, box_shape(box), within(inside, box), out[within(inside, wanted)]


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _cut(start: int, length: int) -> Iterator[tuple[int, int]]:
    for at in range(0, length, STRETCH_BYTES):
        yield start + at, min(STRETCH_BYTES, length - at)


def _over(pieces: Sequence[tuple[int, int]], block: StoredBlock) -> Iterator[tuple[int, int]]:
    """The checksummed ranges of a file that overlap the block."""
    end = block.start + block.length
    return ((at, size) for at, size in pieces if at < end and at + size > block.start)


class _Buffers:
    """Read buffers, one per thread, reused until all is read; pinned for copies to a GPU."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.own = threading.local()

    def take(self, length: int) -> Tensor:
        buffer: Tensor | None = vars(self.own).get("buffer")
        if buffer is None or buffer.numel() < length:
            if self.device is not None:
                torch.cuda.set_device(self.device)  # new threads start on GPU 0
            pins = self.device is not None
            buffer = torch.empty(length, dtype=torch.uint8, pin_memory=pins)
            self.own.buffer = buffer
        return buffer[:length]


def _run_all(jobs: Sequence[Callable[[], None]]) -> None:
    """Runs the jobs in threads; raises the first failure."""
    num = min(MAX_READERS, max(NUM_READERS, num_cores()))
    pool = ThreadPoolExecutor(num)
    try:
        for future in [pool.submit(job) for job in jobs]:
            future.result()
    finally:
        pool.shutdown(cancel_futures=True)
