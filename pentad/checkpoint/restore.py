"""Restoring state from a committed checkpoint: any layout from any layout, every byte verified.

Each rank reads what its tensors hold. A backend that names and cuts tensors otherwise says where
the parts of its tensors lie among the saved ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pentad.checkpoint.folders import (
    Checkpoint,
    Damaged,
    FileEntry,
    PieceEntry,
    check_size,
    piece_sentence,
    read_file,
    read_json,
    reading,
)
from pentad.checkpoint.shards import COUNTERS, Stateful
from pentad.core.errors import RunError, UserError
from pentad.models.hf_weights import box_of
from pentad.parallel.cuts import local
from pentad.weights.dcp import DcpFolder, Demand
from pentad.weights.megatron.layout import INDEX
from pentad.weights.regions import Region, clip_all
from pentad.weights.transfer import target_block

OF_A_RANK = "rng."
"""How names of state begin that belongs to one rank: another world may not have it."""
COUNTER_TYPES = {
    **dict.fromkeys(("num_steps", "num_skipped"), int),
    **dict.fromkeys(("backend", "model", "dtype"), str),
    **dict.fromkeys(("tags", "companions"), list),
    "value_head": bool,
    "hf_config": dict,
}
"""What is read out of the counters."""

Sources = Mapping[str, Sequence[Region]]


class Restorable(Stateful, Protocol):
    def begin_restore(self, counters: Mapping[str, Any]) -> None: ...

    def state_sources(self, counters: Mapping[str, Any]) -> Sources | None: ...

    def end_restore(self, counters: Mapping[str, Any]) -> None: ...


class ManifestVerifier:
    """Holds what is read against the digests in a checkpoint's manifest."""

    def __init__(self, checkpoint: Checkpoint, folder: str) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.known: dict[str, dict[tuple[int, int], PieceEntry]] = {}

    def pieces(self, file: str) -> list[tuple[int, int]]:
        if file not in self.known:
            entry = self._entry(file)
            self.known[file] = {(piece.offset, piece.length): piece for piece in entry.pieces}
        return list(self.known[file])

    def check(self, file: str, offset: int, length: int, data: memoryview) -> None:
        piece = self.known[file][offset, length]
        if hashlib.sha256(data).hexdigest() != piece.sha256:
            raise Damaged(piece_sentence(self.checkpoint.root / self.folder / file, piece))

    def _entry(self, file: str) -> FileEntry:
        path = f"{self.folder}/{file}"
        if path not in self.checkpoint.manifest.files:
            where = self.checkpoint.root / self.folder
            raise Damaged(f"{where / INDEX}: names {file}, which is not in the manifest")
        check_size(self.checkpoint, path)
        return self.checkpoint.manifest.files[path]


def open_state(checkpoint: Checkpoint, folder: str) -> DcpFolder:
    """The tensors of one role, verified as they are read; raises Damaged."""
    read_file(checkpoint, f"{folder}/{INDEX}")
    try:
        return DcpFolder(checkpoint.root / folder, verifier=ManifestVerifier(checkpoint, folder))
    except UserError as error:
        raise Damaged(str(error)) from error


def read_counters(checkpoint: Checkpoint, folder: str) -> dict[str, Any]:
    """What `Stateful.state_counters` gave when the state was saved; raises Damaged."""
    path = f"{folder}/{COUNTERS}"
    counters = read_json(checkpoint, path)
    with reading(checkpoint.root / path):
        for name, kind in COUNTER_TYPES.items():
            if type(counters[name]) is not kind:
                raise TypeError(f"{name} is a {type(counters[name]).__name__}")
        for text in counters["tags"] + counters["companions"]:
            if not isinstance(text, str):
                raise TypeError(f"{text} is no text")
    return counters


def restore_learner(learner: Restorable, checkpoint: Checkpoint, folder: str) -> dict[str, Any]:
    """The same call on every rank. A learner that failed here can be restored again, and until
    then refuses to train and to save. Returns the counters."""
    counters = read_counters(checkpoint, folder)
    learner.begin_restore(counters)
    restore(learner.state_tensors(), checkpoint, folder, learner.state_sources(counters))
    learner.end_restore(counters)
    return counters


def restore(
    tensors: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    folder: str,
    sources: Sources | None = None,
) -> None:
    """Fills the tensors in place. Names, shapes and dtypes are checked before the first element
    moves; `sources` gives the parts of tensors that have other names in the checkpoint."""
    fill_state(tensors, open_state(checkpoint, folder), sources)


def fill_state(
    tensors: Mapping[str, Tensor], saved: DcpFolder, sources: Sources | None = None
) -> None:
    """As `restore`, from any DCP folder."""
    demands = [
        demand
        for name, tensor in tensors.items()
        if not (name.startswith(OF_A_RANK) and name not in saved.infos)
        for demand in _demands(name, tensor, saved, None if sources is None else sources.get(name))
    ]
    try:
        saved.read_all(demands)
    except UserError as error:
        raise Damaged(str(error)) from error


def _demands(
    name: str, tensor: Tensor, saved: DcpFolder, regions: Sequence[Region] | None
) -> Iterator[Demand]:
    box, memory = box_of(tensor), local(tensor).detach()
    if regions is None:
        _check(name, tuple(tensor.shape), memory.dtype, saved)
        yield Demand(name, box, memory)
        return
    for region in clip_all(regions, box):
        _check(region.source, region.source_shape, memory.dtype, saved)
        order = sorted(range(len(region.runs)), key=lambda n: region.runs[n].source_dim)
        out = target_block(memory, region).permute(order)
        runs = {run.source_dim for run in region.runs}
        for dim in range(len(region.source_shape)):
            out = out if dim in runs else out.unsqueeze(dim)
        yield Demand(region.source, region.source_box, out)


def _check(name: str, shape: tuple[int, ...], dtype: torch.dtype, saved: DcpFolder) -> None:
    info = saved.infos.get(name)
    if info is None:
        raise RunError(f"{saved.where}: holds no {name}, which this run continues from")
    if info.shape != shape:
        raise RunError(f"{saved.where}: {name} is {list(info.shape)}, not {list(shape)}")
    if torch.promote_types(info.dtype, dtype) != dtype:
        raise RunError(f"{saved.where}: {name} holds {info.dtype}, and {dtype} would round it")
