"""Serialises groups and columns: a JSON header, then raw arrays that a reader can map.

    magic (16 bytes) | header bytes | bytes in all | crc32 of all the rest | header | arrays

Arrays begin at multiples of ALIGN. No pickle. Prompts are not included: they follow from the gid
and the data. Truncated or changed bytes raise ValueError and never give other numbers.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import numpy as np

from pentad.core.errors import RunError
from pentad.core.types import Greedy, Group, Prompt, Sample

MAGIC = b"pentad groups 1\n"
SIZES = struct.Struct("<16sQQ")
CRC = struct.Struct("<I")
START = SIZES.size + CRC.size
ALIGN = 64

PLAIN = ("finish", "given_text", "turns", "reward", "reward_parts")
ARRAYS = ("ids", "mask", "rollout_logprobs", "versions", "routes")
_plain_of, _held_by = attrgetter(*PLAIN), attrgetter(*ARRAYS)
TEXT = "text"
"""Texts are stored among the arrays: JSON is slow with long texts."""
COLUMN = "columns/"

Buffer = bytes | memoryview
ScoredColumns = Mapping[str, Sequence[np.ndarray]]
"""Name -> one token-aligned array per sample."""


def pack_groups(groups: Sequence[Group]) -> list[Buffer]:
    """Packs groups without their prompts into pieces to be written in order; RunError for values
    that are not plain data."""
    parts: dict[str, list[np.ndarray]] = {}
    """Arrays of one name, type and shape are concatenated, in the order of the samples."""
    meta = []
    kinds: dict[tuple[str, np.dtype, tuple[int, ...]], tuple[str, list[np.ndarray]]] = {}
    """Kind -> (key, arrays): a name is written once, not for every sample."""
    for group in groups:
        samples = []
        for sample in group.samples:
            own = {}
            for name, array in _arrays_of(sample):
                kind = name, array.dtype, array.shape[1:]
                alike = kinds.get(kind)
                if alike is None:
                    if array.dtype.hasobject:
                        raise RunError(
                            f"group {group.gid} cannot be kept in a file: {name} has objects"
                        )
                    key = f"{name} {array.dtype.str} {array.shape[1:]}"
                    alike = kinds[kind] = key, parts.setdefault(key, [])
                own[name] = alike[0], len(array)
                alike[1].append(array)
            samples.append(dict(zip(PLAIN, _plain_of(sample), strict=True)) | {"arrays": own})
        greedy = {} if group.greedy is None else {"greedy": asdict(group.greedy)}
        meta.append({"gid": group.gid, "attempt": group.attempt, "samples": samples} | greedy)
    joined = {key: np.concatenate(arrays) for key, arrays in parts.items()}
    return pack_arrays(meta, joined)


def unpack_groups(data: Any, prompt_of: Callable[[int], Prompt]) -> Iterator[Group]:
    """Unpacks groups and adds the prompts of their gids. Arrays are views of the buffer.
    ValueError, TypeError or LookupError for invalid data."""
    meta, arrays = unpack_arrays(data)
    at = dict.fromkeys(arrays, 0)

    def take(key: str, length: int) -> np.ndarray:
        at[key] += length
        return arrays[key][at[key] - length : at[key]]

    for group in meta:
        samples = []
        for saved in group["samples"]:
            own = {name: take(*place) for name, place in saved["arrays"].items()}
            columns = {
                n.removeprefix(COLUMN): own.pop(n) for n in list(own) if n.startswith(COLUMN)
            }
            plain = {name: saved[name] for name in PLAIN} | {
                "turns": tuple((role, words) for role, words in saved["turns"]),
                TEXT: own.pop(TEXT).tobytes().decode("utf-8", "surrogatepass"),
            }
            samples.append(Sample(**own, **plain, columns=columns))  # type: ignore[arg-type]
        greedy = Greedy(**group["greedy"]) if "greedy" in group else None
        yield Group(prompt_of(group["gid"]), samples, group["attempt"], greedy)


def pack_column(arrays: Sequence[np.ndarray]) -> list[Buffer]:
    """Packs one column of all samples of a group."""
    return pack_arrays([len(array) for array in arrays], {"": np.concatenate(arrays)})


def unpack_column(data: Any) -> list[np.ndarray]:
    lengths, arrays = unpack_arrays(data)
    return np.split(arrays[""], np.cumsum(lengths)[:-1])


def add_column(group: Group, name: str, arrays: Sequence[np.ndarray]) -> None:
    """Adds a column. RunError unless every sample has one value per token."""
    ours, wanted = [len(array) for array in arrays], [len(s.ids) for s in group.samples]
    if ours != wanted:
        raise RunError(
            f"column {name} of group {group.gid} has {ours} values, its samples {wanted} tokens"
        )
    for sample, array in zip(group.samples, arrays, strict=True):
        sample.columns[name] = array


def pack_arrays(meta: Any, arrays: Mapping[str, np.ndarray]) -> list[Buffer]:
    """Packs a JSON value and named arrays; RunError for values that are not plain data."""
    described = [[key, a.dtype.str, a.shape] for key, a in arrays.items()]
    try:
        header = json.dumps([described, meta], default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise RunError(f"groups cannot be kept in a file: {error}") from error
    header += b" " * (-(START + len(header)) % ALIGN)
    body: list[Buffer] = [header]
    for array in arrays.values():
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        body += [flat.data, bytes(-flat.nbytes % ALIGN)]
    sizes = SIZES.pack(MAGIC, len(header), START + sum(map(len, body)))
    return [sizes, CRC.pack(_crc([sizes, *body])), *body]


def unpack_arrays(data: Any) -> tuple[Any, dict[str, np.ndarray]]:
    view = memoryview(data)
    if len(view) < START or view[: len(MAGIC)] != MAGIC:
        raise ValueError("it is not a file of groups")
    _, length, size = SIZES.unpack_from(view)
    if len(view) != size:
        raise ValueError(f"it has {len(view)} bytes of {size}")
    if (_crc([view[: SIZES.size], view[START:]]),) != CRC.unpack_from(view, SIZES.size):
        raise ValueError("its bytes have changed since they were written")
    at = START + length
    described, meta = json.loads(bytes(view[START:at]))
    arrays = {}
    for key, dtype, shape in described:
        count = math.prod(shape)
        arrays[key] = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += arrays[key].nbytes + -arrays[key].nbytes % ALIGN
    return meta, arrays


def _crc(pieces: Sequence[Buffer]) -> int:
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def _arrays_of(sample: Sample) -> Iterator[tuple[str, np.ndarray]]:
    yield TEXT, np.frombuffer(sample.text.encode("utf-8", "surrogatepass"), np.uint8)
    for name, array in zip(ARRAYS, _held_by(sample), strict=True):
        if array is not None:
            yield name, array
    if sample.columns:
        for name, column in list(sample.columns.items()):  # a scorer may add one concurrently
            yield COLUMN + name, np.asarray(column)


def _plain(value: Any) -> Any:
    """Converts numpy numbers, which rewards may return, to Python ones."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a plain value")
