"""The store: where the samples of ready groups lie until they are trained, by gid.

The ledger holds states and no payload, the store payload and no states. `put` replaces what it has
of a gid unless that is of a later attempt: a zombie never overwrites its successor.

In a checkpoint, groups are one .npz file (numpy's, no pickle). Its array `meta` holds JSON: for
every group gid, attempt and samples, and for every sample its plain fields and the pieces of the
other arrays that are its own. A prompt is not in it: it follows from the gid and the data.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pentad.core.errors import RunError
from pentad.core.types import Group, Prompt, Sample

PLAIN = ("finish", "text", "given_text", "turns", "reward", "reward_parts")
ARRAYS = ("ids", "mask", "rollout_logprobs", "versions", "routes")
COLUMN = "columns/"


class GroupStore:
    """Keeps the groups themselves: what is got is what was put, not a copy."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}

    def put(self, group: Group) -> None:
        """Keeps the group under its gid; ignored if a later attempt is already here."""
        held = self.groups.get(group.gid)
        if held is None or held.attempt <= group.attempt:
            self.groups[group.gid] = group

    def get(self, gid: int) -> Group:
        if gid not in self.groups:
            raise RunError(f"the samples of group {gid} are not in the store")
        return self.groups[gid]

    def delete(self, gid: int) -> None:
        """Forgets the group; nothing happens if it is not here."""
        self.groups.pop(gid, None)


def pack_groups(groups: Sequence[Group]) -> bytes:
    """The groups without their prompts; RunError for what is no plain value."""
    parts: dict[str, list[np.ndarray]] = {}
    """Arrays alike in name, type and shape lie end to end, in the order of the samples."""
    meta = []
    for group in groups:
        samples = []
        for sample in group.samples:
            own = {}
            for name, array in _arrays_of(sample):
                if array.dtype.hasobject:
                    raise RunError(
                        f"group {group.gid} cannot be kept in a file: {name} has objects"
                    )
                key = f"{name} {array.dtype.str} {array.shape[1:]}"
                own[name] = [key, len(array)]
                parts.setdefault(key, []).append(array)
            samples.append({name: getattr(sample, name) for name in PLAIN} | {"arrays": own})
        meta.append({"gid": group.gid, "attempt": group.attempt, "samples": samples})
    try:
        text = json.dumps({"keys": list(parts), "groups": meta}, default=_plain)
    except (TypeError, ValueError) as error:
        raise RunError(f"groups cannot be kept in a file: {error}") from error
    joined = {str(i): np.concatenate(arrays) for i, arrays in enumerate(parts.values())}
    file = io.BytesIO()
    np.savez(file, meta=np.frombuffer(text.encode(), np.uint8), **joined)  # type: ignore[arg-type]
    return file.getvalue()


def unpack_groups(data: bytes, prompt_of: Callable[[int], Prompt]) -> Iterator[Group]:
    """The groups that were packed, with the prompts of their gids; ValueError, TypeError or
    LookupError for anything that `pack_groups` would not give."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            meta = json.loads(file["meta"].tobytes())
            arrays = {key: file[str(i)] for i, key in enumerate(meta["keys"])}
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"the groups cannot be read: {error}") from error
    at = dict.fromkeys(arrays, 0)

    def take(key: str, length: int) -> np.ndarray:
        at[key] += length
        return arrays[key][at[key] - length : at[key]].copy()

    for group in meta["groups"]:
        samples = []
        for saved in group["samples"]:
            own = {name: take(*place) for name, place in saved["arrays"].items()}
            columns = {
                n.removeprefix(COLUMN): own.pop(n) for n in list(own) if n.startswith(COLUMN)
            }
            plain = {name: saved[name] for name in PLAIN} | {
                "turns": tuple((role, words) for role, words in saved["turns"])
            }
            samples.append(Sample(**own, **plain, columns=columns))  # type: ignore[arg-type]
        yield Group(prompt_of(group["gid"]), samples, group["attempt"])


def _arrays_of(sample: Sample) -> Iterator[tuple[str, np.ndarray]]:
    for name in ARRAYS:
        if (array := getattr(sample, name)) is not None:
            yield name, array
    for name, column in sample.columns.items():
        yield COLUMN + name, np.asarray(column)


def _plain(value: Any) -> Any:
    """Numbers of numpy, which a reward may return."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no plain value")
