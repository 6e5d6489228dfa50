"""One safetensors file: its header checked, and any block of any tensor read where it is wanted.

Bytes go from the file straight into the given memory, or through a small buffer where the dtype,
the device or the order differs. (Mapped files cost several times as much: each page is faulted in.)
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from pentad.core.errors import Problem, RunError, UserError
from pentad.weights.flow import TensorInfo
from pentad.weights.regions import Box, box_shape, full_box, intersect

BUFFER_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
"""What is summed while it is still in the processor's cache."""
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
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafeFile:
    """The tensors of one file. Threads may read at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header, start = _parse(path)
        try:
            self.infos = {name: _info(path, name, entry) for name, entry in header.items()}
            self.offsets = {n: start + entry["data_offsets"][0] for n, entry in header.items()}
        except (KeyError, TypeError, ValueError) as error:
            rule = f"is not a safetensors file ({type(error).__name__} in its header)"
            raise UserError(Problem(str(path), rule)) from error
        self.handle = path.open("rb", buffering=0)
        self.own = threading.local()

    def read(self, name: str, box: Box) -> Tensor:
        out = torch.empty(box_shape(box), dtype=self.infos[name].dtype, device="cpu")
        self.read_into(name, box, out)
        return out

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        """Fills `out`, of the box's shape, whatever its dtype, device and strides."""
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
        """crc32 of the tensor's bytes on disk."""
        total, at, left = 0, self.offsets[name], self.infos[name].size_bytes
        while left:
            piece = self._buffer(min(left, PIECE_BYTES))
            self._fill(name, piece, at)
            total = crc32(piece.numpy().data, total)
            at, left = at + len(piece), left - len(piece)
        return total

    def _buffer(self, size: int) -> Tensor:
        """Bytes to read into, kept per thread: fresh memory would be faulted in each time."""
        kept: Tensor | None = vars(self.own).get("buffer")
        if kept is None or len(kept) < size:
            kept = self.own.buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return kept[:size]

    def _fill(self, name: str, memory: Tensor, offset: int) -> None:
        view = memory.numpy().data
        done = 0
        while done < len(view):
            count = os.preadv(self.handle.fileno(), [view[done:]], offset + done)
            if count == 0:
                raise RunError(f"{self.path}: ended within {name}; it was cut while it was read")
            done += count


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of one file; refuses a file that is not whole."""
    return SafeFile(path).infos


def _parse(path: Path) -> tuple[dict[str, Any], int]:
    """The header's entries, and where the data begins."""
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length)) if length < size else None
    except FileNotFoundError:
        rule = "missing, but the folder's index names it"
        raise UserError(Problem(str(path), rule, "fetch the file again")) from None
    except (struct.error, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(Problem(str(path), f"is not a safetensors file ({error})")) from error
    if not isinstance(header, dict):
        raise UserError(Problem(str(path), "is not a safetensors file (its header is cut off)"))
    header.pop("__metadata__", None)
    try:
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (KeyError, TypeError, IndexError) as error:
        rule = f"is not a safetensors file ({type(error).__name__} in its header)"
        raise UserError(Problem(str(path), rule)) from error
    if size != 8 + length + end:
        rule = f"has {size} bytes, but its header says {8 + length + end}"
        raise UserError(Problem(str(path), rule, "fetch or write the file again"))
    return header, 8 + length


def _info(path: Path, name: str, entry: Mapping[str, Any]) -> TensorInfo:
    if entry["dtype"] not in DTYPES:
        raise UserError(Problem(f"{path}: {name}", f"dtype {entry['dtype']} is not known"))
    info = TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]])
    start, stop = entry["data_offsets"]
    if stop - start != info.size_bytes or start < 0:
        rule = f"{stop - start} bytes are no {entry['dtype']} of shape {list(info.shape)}"
        raise UserError(Problem(f"{path}: {name}", rule, "fetch or write the file again"))
    return info
