"""Messages between the processes of a run: frames of JSON, raw arrays and bytes; errors as JSON.

A frame consists of three sizes, a table of arrays (JSON), items (JSON) and the bytes of the arrays;
nothing is unpickled or executed. Every frame has the generation of its sender. NumPy is imported
only for arrays: the processes of rewards and environments start without it.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

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
BYTES = "bytes"
"""Stands for a dtype in the table of arrays."""


class BadFrame(Exception):
    """The received bytes are not a frame."""


def pack(generation: int, items: list[dict[str, Any]]) -> list[bytes | memoryview]:
    """Returns the parts of a frame; the items may contain numpy arrays and bytes at any depth."""
    table: list[tuple[str, Any]] = []
    data: list[bytes | memoryview] = []

    def convert(value: object) -> object:
        numpy = sys.modules.get("numpy")
        if isinstance(value, bytes):
            table.append((BYTES, [len(value)]))
            data.extend((value, bytes(-len(value) % ALIGN)))
        elif numpy is not None and isinstance(value, numpy.ndarray):
            if value.dtype.kind not in "biuf":
                raise TypeError(f"arrays of {value.dtype} cannot be sent")
            array = numpy.asarray(value, order="C")
            table.append((array.dtype.str, array.shape))
            data.extend((array.reshape(-1).view(numpy.uint8).data, bytes(-array.nbytes % ALIGN)))
        elif numpy is not None and isinstance(value, numpy.generic):
            return value.item()
        else:
            raise TypeError(f"{type(value).__name__} cannot be sent")
        return {ARRAY: len(table) - 1}

    text = json.dumps(items, default=convert, separators=(",", ":")).encode()
    head = json.dumps([generation, table]).encode()
    size = sum(len(part) for part in data)
    return [SIZES.pack(len(head), len(text), size), head, text, *data]


def unpack(table: bytes, text: bytes, data: bytes) -> tuple[int, list[dict[str, Any]]]:
    """Returns the generation and the items of a frame. Raises BadFrame."""
    try:
        generation, shapes = json.loads(table)
        arrays = _arrays_of(shapes, data)
        items = json.loads(
            text, object_hook=lambda one: arrays[one[ARRAY]] if ARRAY in one else one
        )
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise BadFrame(f"cannot be read ({type(error).__name__})") from error
    is_form = isinstance(items, list) and all(isinstance(item, dict) for item in items)
    if not is_form or not isinstance(generation, int):
        raise BadFrame("has other data than items")
    return generation, items


def _arrays_of(shapes: list[Any], data: bytes) -> list[Any]:
    arrays: list[Any] = []
    end = 0
    for name, shape in shapes:
        if any(not isinstance(n, int) or n < 0 for n in shape):
            raise BadFrame("has other data than arrays of numbers")
        if name == BYTES:
            start, end = end, end + math.prod(shape)
            arrays.append(data[start:end])
        else:
            import numpy as np

            dtype = np.dtype(name)
            if dtype.kind not in "biuf":
                raise BadFrame("has other data than arrays of numbers")
            arrays.append(np.frombuffer(data, dtype, math.prod(shape), end).reshape(shape))
            end += math.prod(shape) * dtype.itemsize
        end += -end % ALIGN
    if end != len(data):
        raise BadFrame(f"has {len(data)} bytes of arrays where its table says {end}")
    return arrays


def sizes_in(header: bytes) -> tuple[int, ...]:
    """Returns the sizes of a frame's parts from its header. Raises BadFrame if it is too large."""
    sizes = SIZES.unpack(header)
    if sum(sizes) > MAX_FRAME_BYTES:
        raise BadFrame(f"has {sum(sizes)} bytes, and {MAX_FRAME_BYTES} are allowed")
    return sizes


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, list[dict[str, Any]]]:
    sizes = sizes_in(await reader.readexactly(SIZES.size))
    return unpack(*[await reader.readexactly(size) for size in sizes])


# Without an event loop: one end of a socket pair, and the other until it is a `wire.Connection`.


def send(sock: socket.socket, item: dict[str, Any]) -> None:
    sock.sendall(b"".join(pack(0, [item])))


def receive(sock: socket.socket) -> list[dict[str, Any]]:
    """Returns the items of the next frame. EOFError if the other end has closed, TimeoutError by
    the timeout of the socket."""
    sizes = sizes_in(_read(sock, SIZES.size))
    return unpack(*[_read(sock, size) for size in sizes])[1]


def _read(sock: socket.socket, num: int) -> bytes:
    found = bytearray(num)
    view = memoryview(found)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return bytes(found)


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
