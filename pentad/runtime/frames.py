"""Messages between the processes of a run: frames of JSON and raw arrays, and errors as JSON.

A frame consists of three sizes, a table of arrays (JSON), items (JSON) and the bytes of the arrays;
nothing is unpickled or executed. Every frame has the generation of its sender.
"""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from pentad.core.errors import (
    DataFailure,
    FlawedAnswer,
    InfraFailure,
    Interrupted,
    Problem,
    RunError,
    Transient,
    UserError,
)

SIZES = struct.Struct("!IIQ")
"""Header of a frame: the sizes of the table, of the items and of the arrays, in bytes."""
MAX_FRAME_BYTES = 1 << 28
ALIGN = 8
ARRAY = "__array__"


class BadFrame(Exception):
    """The received bytes are not a frame."""


def pack(generation: int, items: list[dict[str, Any]]) -> list[bytes | memoryview]:
    """Returns the parts of a frame; the items may contain numpy arrays at any depth."""
    arrays: list[np.ndarray] = []

    def convert(value: object) -> object:
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biuf":
                raise TypeError(f"arrays of {value.dtype} cannot be sent")
            arrays.append(np.asarray(value, order="C"))
            return {ARRAY: len(arrays) - 1}
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot be sent")

    text = json.dumps(items, default=convert, separators=(",", ":")).encode()
    table = json.dumps([generation, [[a.dtype.str, a.shape] for a in arrays]]).encode()
    data: list[bytes | memoryview] = []
    for array in arrays:
        data += [array.reshape(-1).view(np.uint8).data, bytes(-array.nbytes % ALIGN)]
    size = sum(len(part) for part in data)
    return [SIZES.pack(len(table), len(text), size), table, text, *data]


def unpack(table: bytes, text: bytes, data: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Returns the generation and the items of a frame. Raises BadFrame."""
    try:
        generation, shapes = json.loads(table)
        arrays, end = [], 0
        for name, shape in shapes:
            dtype = np.dtype(name)
            if dtype.kind not in "biuf" or any(not isinstance(n, int) or n < 0 for n in shape):
                raise BadFrame("has other data than arrays of numbers")
            count = math.prod(shape)
            arrays.append(np.frombuffer(data, dtype, count, end).reshape(shape))
            end += count * dtype.itemsize
            end += -end % ALIGN
        if end != len(data):
            raise BadFrame(f"has {len(data)} bytes of arrays where its table says {end}")
        items = json.loads(
            text, object_hook=lambda one: arrays[one[ARRAY]] if ARRAY in one else one
        )
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise BadFrame(f"cannot be read ({type(error).__name__})") from error
    is_form = isinstance(items, list) and all(isinstance(item, dict) for item in items)
    if not is_form or not isinstance(generation, int):
        raise BadFrame("has other data than items")
    return generation, items


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, list[dict[str, Any]]]:
    sizes = SIZES.unpack(await reader.readexactly(SIZES.size))
    if sum(sizes) > MAX_FRAME_BYTES:
        raise BadFrame(f"has {sum(sizes)} bytes, and {MAX_FRAME_BYTES} are allowed")
    return unpack(*[await reader.readexactly(size) for size in sizes])


# Errors.

PLAIN: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (RunError, Transient, Interrupted, InfraFailure, FlawedAnswer)
}


def describe_error(error: BaseException) -> dict[str, Any]:
    """Converts an error to a JSON value from which `revive_error` makes an equal one."""
    if isinstance(error, UserError):
        described = [
            [p.where, p.rule, p.remedy] if isinstance(p, Problem) else p for p in error.problems
        ]
        return {"kind": "UserError", "problems": described}
    if isinstance(error, DataFailure):
        described = [error.reason, error.detail]
        return {"kind": "DataFailure", "args": described, "is_final": error.is_final}
    name = type(error).__name__
    return {"kind": name, "text": str(error)}


def revive_error(where: str, described: Mapping[str, Any]) -> Exception:
    kind = str(described.get("kind"))
    if kind == "UserError":
        return UserError([p if isinstance(p, str) else Problem(*p) for p in described["problems"]])
    if kind == "DataFailure":
        return DataFailure(*described["args"], is_final=bool(described["is_final"]))
    text = str(described.get("text"))
    return PLAIN[kind](text) if kind in PLAIN else RunError(f"{where} failed: {kind}: {text}")
