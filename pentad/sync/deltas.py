"""Selects the tensors of a new version to be sent: those whose digest is unchanged are skipped.

In a folder that replicas read (`published`), unchanged tensors stay in the file of the version that
wrote them, linked into the new folder: a receiver that has the previous version reads only the new
file, any other reads all. The digest of all tensors verifies the result. A server receives the
changed modules; then all its tensors are compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.roles import TensorPairs
from pentad.ops.digest import WeightDigest, digest_of
from pentad.sync.published import INDEX, PublishedWeights, by_width, make_file, no_room
from pentad.weights.hf import FileLayout
from pentad.weights.transfer import TensorInfo

MAX_KEPT = 2
"""Files of old versions are dropped if they and the new one would exceed this multiple of the
weights' size, because most of their content is stale then."""
MAX_SENT = 0.5
"""A server receives only a part of the weights if it is at most this share of them: a larger part
is not worth the comparison that follows."""
FUSED = (
    (re.compile(r"\.experts\.\d+\..*"), ".experts"),
    (re.compile(r"\.(q|k|v)_proj\.[^.]*$"), ".qkv_proj"),
    (re.compile(r"\.(gate|up)_proj\.[^.]*$"), ".gate_up_proj"),
)


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """The files with the newest version's tensors."""

    version: int
    digest: WeightDigest
    folder: Path
    files: dict[str, str]
    """File of each tensor."""
    sizes: dict[str, int]
    """Bytes of each file."""


def unchanged(
    base: WrittenVersion | None, digest: WeightDigest, infos: Mapping[str, TensorInfo]
) -> list[str]:
    """Returns the tensors that can stay in their files."""
    if base is None:
        return []
    same = [n for n, entry in digest.entries.items() if base.digest.entries.get(n) == entry]
    whole = sum(info.size_bytes for info in infos.values())
    changed = whole - sum(infos[name].size_bytes for name in same)
    kept = sum(base.sizes[file] for file in {base.files[name] for name in same})
    return same if kept + changed <= MAX_KEPT * whole else []


@dataclass(frozen=True, slots=True)
class VersionPlan:
    """The folder of a version: a file of the changed tensors, and links to the files of the
    others."""

    written: WrittenVersion
    base: WrittenVersion | None
    layout: FileLayout
    """The layout of the new file."""
    newest: str

    @property
    def changed(self) -> Mapping[str, TensorInfo]:
        return self.layout.infos

    def make(self) -> Tensor | None:
        """Makes links, index and the new file; returns the file's memory if a tensor changed.
        OSError if links or index cannot be made; RunError without disk space."""
        folder = self.written.folder
        folder.mkdir(mode=0o700)
        try:
            if self.base is not None:
                for file in sorted(set(self.written.files.values()) - {self.newest}):
                    os.link(self.base.folder / file, folder / file)
            base = [self.base.version, self.base.digest.hex()] if self.base else [-1, ""]
            index = {"base": base, "newest": self.newest, "weight_map": self.written.files}
            (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return make_file(folder / self.newest, self.layout) if self.changed else None

    def published(self, writers: Sequence[int] = ()) -> PublishedWeights:
        written = self.written
        size = self.layout.num_bytes if self.changed else 0
        place, digest = str(written.folder), written.digest.hex()
        count = len(written.files)
        return PublishedWeights(
            written.version, digest, "file", place, count, size, writers=tuple(writers)
        )


def plan_version(
    version: int,
    folder: Path,
    infos: Mapping[str, TensorInfo],
    digest: WeightDigest,
    base: WrittenVersion | None,
) -> VersionPlan:
    """Plans the folder of a version. `base` None: all tensors are written."""
    same = set(unchanged(base, digest, infos))
    layout = by_width({name: info for name, info in infos.items() if name not in same})
    newest = f"{folder.name}.safetensors"
    files = dict.fromkeys(infos, newest)
    sizes = {newest: layout.num_bytes} if layout.infos else {}
    if base is not None and same:
        files |= {name: base.files[name] for name in same}
        sizes |= {file: base.sizes[file] for file in set(files.values()) - {newest}}
    written = WrittenVersion(version, digest, folder, files, sizes)
    return VersionPlan(written, base if same else None, layout, newest)


def make_version(
    version: int,
    folder: Path,
    infos: Mapping[str, TensorInfo],
    digest: WeightDigest,
    base: WrittenVersion | None,
) -> tuple[VersionPlan, Tensor | None]:
    """Plans and makes the folder of a version; of all tensors if the file system has no links.
    Returns the memory of its new file too, if a tensor changed. RunError without disk space."""
    plan = plan_version(version, folder, infos, digest, base)
    try:
        return plan, plan.make()
    except OSError as error:
        if plan.base is None:
            raise RunError(no_room(folder, plan.layout.num_bytes, error)) from error
    return make_version(version, folder, infos, digest, None)


def module_of(name: str) -> str:
    """Returns the server's module of the tensor, including tensors that it is fused with."""
    for pattern, module in FUSED:
        if pattern.search(name):
            return pattern.sub(module, name)
    return name.rpartition(".")[0] or name


def changed_modules(
    weights: TensorPairs, held: Mapping[str, str], now: Mapping[str, str]
) -> TensorPairs:
    """Returns the tensors of all modules with a changed tensor, because a server loads whole
    modules."""
    changed = {module_of(name) for name, entry in now.items() if held.get(name) != entry}
    if not changed:  # a load must set the version label
        changed = {module_of(min(weights, key=lambda pair: pair[1].nbytes)[0])}
    return [(name, tensor) for name, tensor in weights if module_of(name) in changed]


def size_of(pairs: TensorPairs) -> int:
    return sum(tensor.nbytes for _, tensor in pairs)


class ChangedOnly:
    """Selects the tensors to send to a server, given those it has. These are unknown after a
    failure, and for a server that reports another version than the installed one."""

    def __init__(self, is_on: bool, label: Callable[[], Awaitable[str]]) -> None:
        """`label`: queries the server's weight version."""
        self.is_on = is_on
        self.label = label
        self.held: Mapping[str, str] = {}
        self.given = ""
        self.digest = WeightDigest()
        """Digest of all weights at the last selection."""

    async def choose(self, weights: TensorPairs) -> TensorPairs:
        if not self.is_on:
            return weights
        self.digest = await asyncio.to_thread(digest_of, weights)
        held, self.held = self.held, {}
        if not held or await self.label() != self.given:
            return weights
        part = changed_modules(weights, held, self.digest.entries)
        return part if size_of(part) <= MAX_SENT * size_of(weights) else weights

    def digest_of_part(self, part: TensorPairs) -> str:
        digest = WeightDigest()
        digest.entries.update({name: self.digest.entries[name] for name, _ in part})
        return digest.hex()

    def keep(self, version: int) -> None:
        """Called after the server's weights were verified to be those of the last selection."""
        self.given, self.held = str(version), self.digest.entries
