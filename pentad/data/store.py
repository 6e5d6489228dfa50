"""The store: where the samples of ready groups lie until they are trained, by gid.

The ledger holds states and no payload, the store payload and no states. `put` replaces what it has
of a gid unless that is of a later attempt: a zombie never overwrites its successor.

Files of FileStore, one a group, `{gid:012d}-{attempt:04d}.npz`: an uncompressed zip of .npy arrays
(numpy's npz, no pickle). `meta.npy` holds the bytes of a JSON object:

    {"format": 1, "attempt": 0,
     "prompt": {"gid": 17, "ids": [5, 9], "fields": {...}, "text": "...", "epoch": 0},
     "samples": [{"finish": "stop", "text": "...", "reward": 1.0, "reward_parts": {...},
                  "columns": ["ref_logprobs"]}, ...]}

and sample i has `{i}/ids.npy`, `{i}/mask.npy`, `{i}/rollout_logprobs.npy`, `{i}/versions.npy`,
`{i}/columns/{name}.npy`, and `{i}/routes.npy` if it has routes, with the dtypes they were given. A
file is written aside under a name that starts with a dot and then renamed, so readers see whole
files or none; the zip's CRC tells one that a power cut tore.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pentad.core.errors import RunError
from pentad.core.types import Group, Prompt, Sample

FORMAT = 1
NAME = re.compile(r"(\d{12,})-(\d{4,})\.npz")


class Store(Protocol):
    def put(self, group: Group) -> None:
        """Keeps the group under its gid; ignored if a later attempt is already here."""
        ...

    def get(self, gid: int) -> Group:
        """The group as it was put; RunError if it is not here or not whole."""
        ...

    def delete(self, gid: int) -> None:
        """Forgets the group; nothing happens if it is not here."""
        ...

    def keys(self) -> list[int]:
        """All gids here, in order."""
        ...

    def intact(self, gid: int) -> bool:
        """Whether `get` would return the group whole."""
        ...


class MemoryStore:
    """Keeps the groups themselves: what is got is what was put, not a copy."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}

    def put(self, group: Group) -> None:
        held = self.groups.get(group.gid)
        if held is None or held.attempt <= group.attempt:
            self.groups[group.gid] = group

    def get(self, gid: int) -> Group:
        if gid not in self.groups:
            raise RunError(f"the samples of group {gid} are not in the store")
        return self.groups[gid]

    def delete(self, gid: int) -> None:
        self.groups.pop(gid, None)

    def keys(self) -> list[int]:
        return sorted(self.groups)

    def intact(self, gid: int) -> bool:
        return gid in self.groups


class FileStore:
    """Keeps each group in a file, so that ready groups outlive the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, group: Group) -> None:
        old = self._path(group.gid)
        if old is not None and _attempt(old) > group.attempt:
            return
        path = self.folder / f"{group.gid:012d}-{group.attempt:04d}.npz"
        aside = self.folder / f".{path.name}.{os.getpid()}"
        try:
            _write(aside, _arrays(group))
            aside.replace(path)
        except (TypeError, ValueError) as error:
            raise RunError(f"group {group.gid} cannot be kept in a file: {error}") from error
        finally:
            aside.unlink(missing_ok=True)
        if old is not None and old != path:
            old.unlink(missing_ok=True)

    def get(self, gid: int) -> Group:
        path = self._path(gid)
        if path is None:
            raise RunError(f"the samples of group {gid} are not in {self.folder}")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return _group(arrays)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise RunError(f"{path} is damaged: {error}") from error

    def delete(self, gid: int) -> None:
        for path in self.folder.glob(f"{gid:012d}-*.npz"):
            path.unlink(missing_ok=True)

    def keys(self) -> list[int]:
        names = [NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        return sorted({int(name[1]) for name in names if name})

    def intact(self, gid: int) -> bool:
        try:
            self.get(gid)
        except RunError:
            return False
        return True

    def _path(self, gid: int) -> Path | None:
        """The file of the latest attempt."""
        return max(self.folder.glob(f"{gid:012d}-*.npz"), key=_attempt, default=None)


def _attempt(path: Path) -> int:
    name = NAME.fullmatch(path.name)
    assert name is not None, f"{path} is not a file of the store"
    return int(name[2])


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)


def _arrays(group: Group) -> dict[str, np.ndarray]:
    prompt = group.prompt
    meta = {
        "format": FORMAT,
        "attempt": group.attempt,
        "prompt": {
            "gid": prompt.gid,
            "ids": list(prompt.ids),
            "fields": dict(prompt.fields),
            "text": prompt.text,
            "epoch": prompt.epoch,
        },
        "samples": [
            {
                "finish": sample.finish,
                "text": sample.text,
                "reward": sample.reward,
                "reward_parts": sample.reward_parts,
                "columns": list(sample.columns),
            }
            for sample in group.samples
        ],
    }
    arrays: dict[str, np.ndarray] = {"meta": np.frombuffer(json.dumps(meta).encode(), np.uint8)}
    for i, sample in enumerate(group.samples):
        arrays[f"{i}/ids"] = sample.ids
        arrays[f"{i}/mask"] = sample.mask
        arrays[f"{i}/rollout_logprobs"] = sample.rollout_logprobs
        arrays[f"{i}/versions"] = sample.versions
        if sample.routes is not None:
            arrays[f"{i}/routes"] = sample.routes
        for name, column in sample.columns.items():
            arrays[f"{i}/columns/{name}"] = column
    return arrays


def _group(arrays: Any) -> Group:
    meta = json.loads(arrays["meta"].tobytes())
    if meta["format"] != FORMAT:
        raise ValueError(f"format {meta['format']!r}, this version reads {FORMAT}")
    saved = meta["prompt"]
    prompt = Prompt(
        saved["gid"], tuple(saved["ids"]), saved["fields"], saved["text"], saved["epoch"]
    )
    samples = [
        Sample(
            ids=arrays[f"{i}/ids"],
            mask=arrays[f"{i}/mask"],
            rollout_logprobs=arrays[f"{i}/rollout_logprobs"],
            versions=arrays[f"{i}/versions"],
            finish=entry["finish"],
            text=entry["text"],
            reward=entry["reward"],
            reward_parts=entry["reward_parts"],
            columns={name: arrays[f"{i}/columns/{name}"] for name in entry["columns"]},
            routes=arrays.get(f"{i}/routes"),
        )
        for i, entry in enumerate(meta["samples"])
    ]
    return Group(prompt, samples, meta["attempt"])
