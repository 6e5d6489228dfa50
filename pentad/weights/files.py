"""Reads one safetensors file: checks the header and reads any block of any tensor.

Bytes are read directly into the given memory, or through a small buffer if dtype, device or order
differ. (Memory mapping costs several times as much, because of page faults.)
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy
import torch
from torch import Tensor

from pentad.core.errors import Problem, RunError, UserError
from pentad.core.folders import MAX_JSON_BYTES, open_file, parse_json
from pentad.weights.regions import Box, box_shape, full_box, intersect
from pentad.weights.transfer import TensorInfo

BUFFER_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
"""Bytes that are summed while in the CPU cache; a multiple of the block size."""
BLOCK_WORDS = 512
MAX_NUMBER = 1 << 63
"""Exclusive upper bound of sizes and offsets."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Header = tuple[dict[str, TensorInfo], dict[str, int]]
"""(tensors of a file, offset of each)."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def checksum(data: memoryview, total: int = 0) -> int:
    """Checksum: crc32 of the sums of blocks of 64-bit words and of the remaining bytes.

    Several times as fast as crc32 alone. It detects any single changed word, and missing or swapped
    blocks, which are the usual disk errors. It does not protect against forgery.
    """
    block_bytes = 8 * BLOCK_WORDS
    whole = len(data) // block_bytes * block_bytes
    words = numpy.frombuffer(data[:whole], dtype=numpy.uint64)
    sums = words.reshape(-1, BLOCK_WORDS).sum(axis=1, dtype=numpy.uint64)
    return crc32(data[whole:], crc32(sums.data, total))


def memory_of(flat_B: Tensor) -> memoryview:
    """The memory of bytes on the host. `Tensor.numpy` would mark their storage as not resizable,
    and a model with such storages cannot be offloaded."""
    array = (ctypes.c_ubyte * flat_B.numel()).from_address(flat_B.data_ptr())
    array.owner = flat_B  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


class SafeFile:
    """Reader of the tensors of one file; thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.infos, self.offsets = _open(path)
        self.handle = open_file(path)
        self.own = threading.local()

    def read(self, name: str, box: Box) -> Tensor:
        out = torch.empty(box_shape(box), dtype=self.infos[name].dtype, device="cpu")
        self.read_into(name, box, out)
        return out

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        """Fills `out`, of the box's shape, with any dtype, device and strides."""
        info = self.infos[name]
        assert intersect(box, full_box(info.shape)) == box or out.numel() == 0, f"{name}: {box}"
        if out.numel() == 0:
            return
        shape = info.shape or (1,)
        box, out = box or ((0, 1),), out.view(out.shape or (1,))
        row_bytes = math.prod(shape[1:]) * info.dtype.itemsize
        first = self.offsets[name] + box[0][0] * row_bytes
        is_whole_rows = box[1:] == full_box(shape[1:])
        is_same = out.dtype == info.dtype and out.device.type == "cpu" and out.is_contiguous()
        if is_whole_rows and is_same:
            self._fill(name, out.view(-1).view(torch.uint8), first)
            return
        columns = tuple(slice(start, stop) for start, stop in box[1:])
        step = max(1, BUFFER_BYTES // row_bytes)
        for at in range(0, out.shape[0], step):
            target = out[at : at + step]
            rows = self._buffer(len(target) * row_bytes)
            self._fill(name, rows, first + at * row_bytes)
            values = rows.view(info.dtype).view(len(target), *shape[1:])
            target.copy_(values[(slice(None), *columns)])

    def checksum(self, name: str) -> int:
        """`checksum` of the tensor's bytes on disk."""
        total, at, left = 0, self.offsets[name], self.infos[name].size_bytes
        while left:
            piece = self._buffer(min(left, PIECE_BYTES))
            self._fill(name, piece, at)
            total = checksum(piece.numpy().data, total)
            at, left = at + len(piece), left - len(piece)
        return total

    def _buffer(self, size: int) -> Tensor:
        """A read buffer per thread: new memory would cause page faults on each read."""
        kept: Tensor | None = vars(self.own).get("buffer")
        if kept is None or len(kept) < size:
            kept = self.own.buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return kept[:size]

    def _fill(self, name: str, memory: Tensor, offset: int) -> None:
        view = memory_of(memory)
        done = 0
        while done < len(view):
            count = os.preadv(self.handle.fileno(), [view[done:]], offset + done)
            if count == 0:
                raise RunError(f"{self.path}: ended within {name}; it was truncated while read")
            done += count


def _open(path: Path) -> Header:
    try:
        with open_file(path) as handle:
            return read_header(handle, path.stat().st_size, str(path))
    except FileNotFoundError:
        rule = "missing, but the folder's index names it"
        raise UserError(Problem(str(path), rule, "fetch the file again")) from None
    except OSError as error:
        raise UserError(Problem(str(path), f"cannot be read ({error.strerror})")) from error


def read_header(handle: BinaryIO, size: int, where: str) -> Header:
    """Parses the header of a file of `size` bytes and validates its entries."""
    try:
        (length,) = struct.unpack("<Q", handle.read(8))
        if length >= size:
            raise ValueError("its header is truncated")
        if length > MAX_JSON_BYTES:
            raise ValueError(f"its header has {length} bytes, at most {MAX_JSON_BYTES} are")
        header = parse_json(handle.read(length), _each_once)
        header.pop("__metadata__", None)
        numbers = {n: [*entry["shape"], *entry["data_offsets"]] for n, entry in header.items()}
        pairs = [(name, *entry["data_offsets"]) for name, entry in header.items()]
        ends = sorted((start, stop, name) for name, start, stop in pairs)
        wrong = [name for name, row in numbers.items() if not all(map(_is_size, row))]
        if wrong:
            raise ValueError(f"{wrong[0]}: shape or offsets are {str(numbers[wrong[0]])[:99]}")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(Problem(where, f"is not a safetensors file ({error})")) from error
    expected = 8 + length + max((stop for _, stop, _ in ends), default=0)
    if size != expected:
        rule = f"has {size} bytes, but its header says {expected}"
        raise UserError(Problem(where, rule, "fetch or write the file again"))
    _check_order(where, ends)
    infos = {name: _info(where, name, entry) for name, entry in header.items()}
    return infos, {n: 8 + length + entry["data_offsets"][0] for n, entry in header.items()}


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < MAX_NUMBER


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object and rejects duplicate names, which json would drop silently."""
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is in it twice")
    return out


def _check_order(where: str, ends: list[tuple[int, int, str]]) -> None:
    """Raises unless the tensors cover the data without gaps or overlaps."""
    at = 0
    for start, stop, name in ends:
        if start != at:
            rule = f"its bytes begin at {start}, but those of the tensor before it end at {at}"
            raise UserError(Problem(f"{where}: {name}", rule, "fetch or write the file again"))
        at = stop


def _info(where: str, name: str, entry: Mapping[str, Any]) -> TensorInfo:
    dtype = str(entry.get("dtype"))
    if dtype not in DTYPES:
        raise UserError(Problem(f"{where}: {name}", f"dtype {dtype} is not known"))
    info = TensorInfo(tuple(entry["shape"]), DTYPES[dtype])
    start, stop = entry["data_offsets"]
    if stop - start != info.size_bytes:
        rule = f"{stop - start} bytes are not {dtype} of shape {list(info.shape)}"
        raise UserError(Problem(f"{where}: {name}", rule, "fetch or write the file again"))
    return info
