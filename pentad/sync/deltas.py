"""What of a new version must travel: tensors whose digest is that of the version before need not.

In files that replicas read (`tickets`) what did not change stays in the file of the version that
wrote it, and every ticket says where all tensors lie: whoever holds the version before reads only
the new file, anybody else reads all. What a receiver ends with is proven by the digest of all.
To a server go the modules in which something changed; then all that it holds is compared.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pentad.core.roles import TensorPairs
from pentad.ops.digest import WeightDigest, digest_of
from pentad.sync.tickets import Ticket
from pentad.weights.transfer import TensorInfo

Blocks = dict[str, list[list[Any]]]
"""By tensor: [file, offset, box] of each block."""
MAX_KEPT = 2
"""Files of old versions are left behind where they and the new one would be more than so many
times the weights: most of what they hold is stale then."""
MAX_SENT = 0.5
"""A server gets a part of the weights where it is at most so much of them: the comparison that
follows costs more than a few tensors."""
FUSED = (
    (re.compile(r"\.experts\.\d+\..*"), ".experts"),
    (re.compile(r"\.(q|k|v)_proj\.[^.]*$"), ".qkv_proj"),
    (re.compile(r"\.(gate|up)_proj\.[^.]*$"), ".gate_up_proj"),
)


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """Where the tensors of the newest version lie."""

    version: int
    digest: WeightDigest
    blocks: Blocks
    sizes: dict[str, int]
    """Bytes of each file."""


def unchanged(
    base: WrittenVersion | None, digest: WeightDigest, infos: Mapping[str, TensorInfo]
) -> list[str]:
    """Tensors that can stay where they are."""
    if base is None:
        return []
    same = [n for n, entry in digest.entries.items() if base.digest.entries.get(n) == entry]
    whole = sum(info.size_bytes for info in infos.values())
    changed = whole - sum(infos[name].size_bytes for name in same)
    files = {file for name in same for file, *_ in base.blocks[name]}
    kept = sum(base.sizes[file] for file in files)
    return same if kept + changed <= MAX_KEPT * whole else []


def join_versions(
    version: int,
    place: str,
    infos: Mapping[str, TensorInfo],
    digest: WeightDigest,
    written: WrittenVersion,
    base: WrittenVersion | None,
    same: Sequence[str],
    marks: Sequence[str],
) -> tuple[Ticket, WrittenVersion]:
    """The ticket of what was `written` and of what stays, and where all of it lies now."""
    blocks, sizes = dict(written.blocks), dict(written.sizes)
    if base is not None:
        blocks |= {name: base.blocks[name] for name in same}
        sizes |= {file: base.sizes[file] for name in same for file, *_ in base.blocks[name]}
    numbers = {file: number for number, file in enumerate(sizes)}
    tensors = [
        [name, str(info.dtype)[6:], list(info.shape)]
        + [[[numbers[file], offset, box] for file, offset, box in blocks[name]]]
        for name, info in infos.items()
    ]
    ticket = Ticket(
        version,
        "file",
        place,
        sum(written.sizes.values()),
        tensors,
        digest.hex(),
        marks=tuple(marks),
        sources=tuple(sizes.items()),
        base=(base.version, base.digest.hex()) if base is not None and same else (),
        same=tuple(same),
    )
    return ticket, WrittenVersion(version, digest, blocks, sizes)


def module_of(name: str) -> str:
    """The module of a server that holds the tensor, with its other tensors and those it is fused
    with."""
    for pattern, module in FUSED:
        if pattern.search(name):
            return pattern.sub(module, name)
    return name.rpartition(".")[0] or name


def changed_modules(
    weights: TensorPairs, held: Mapping[str, str], now: Mapping[str, str]
) -> TensorPairs:
    """The tensors of all modules in which one changed: a server loads a module whole."""
    changed = {module_of(name) for name, entry in now.items() if held.get(name) != entry}
    if not changed:  # something must carry the name of the version
        changed = {module_of(min(weights, key=lambda pair: pair[1].nbytes)[0])}
    return [(name, tensor) for name, tensor in weights if module_of(name) in changed]


def size_of(pairs: TensorPairs) -> int:
    return sum(tensor.nbytes for _, tensor in pairs)


class ChangedOnly:
    """What of new weights a server needs, by what it is known to hold: nothing is known after a
    failure, nor of a server that gives its weights another name than they were given."""

    def __init__(self, is_on: bool, label: Callable[[], Awaitable[str]]) -> None:
        """`label`: asks the server what it calls its weights."""
        self.is_on = is_on
        self.label = label
        self.held: Mapping[str, str] = {}
        self.given = ""
        self.digest = WeightDigest()
        """Of the weights that were chosen from last."""

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
        """The server holds what was chosen from, as it has proven."""
        self.given, self.held = str(version), self.digest.entries
