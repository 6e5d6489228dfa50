"""Restores the state of a committed checkpoint to any layout, or writes it as an HF folder without
its run, ranks or devices; every byte is verified.

Each rank reads only its parts. A backend with other tensor names or splits maps its parts to the
saved ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pentad.checkpoint.folders import (
    Checkpoint,
    Damaged,
    FileEntry,
    Manifest,
    PieceEntry,
    check_size,
    find_checkpoints,
    folder_of,
    from_storage,
    piece_sentence,
    read_file,
    read_json,
    reading,
    state_folder,
)
from pentad.checkpoint.shards import COUNTERS, Stateful
from pentad.core.device import DTYPES
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.folders import STATE, RecoveryPath
from pentad.models.hf_weights import hf_metadata
from pentad.models.language_model import LanguageModel
from pentad.models.registry import build_whole, save_model
from pentad.models.towers import tower_of
from pentad.parallel.cuts import local
from pentad.weights.boxes import box_of
from pentad.weights.dcp import DcpFolder, Demand
from pentad.weights.megatron.layout import INDEX
from pentad.weights.regions import Region, clip_all
from pentad.weights.transfer import TensorInfo, target_block

OF_A_RANK = "rng."
"""Prefix of state of a single rank, which another world size may lack."""
COUNTER_TYPES = {
    **dict.fromkeys(("num_steps", "num_skipped"), int),
    **dict.fromkeys(("backend", "model", "dtype"), str),
    **dict.fromkeys(("tags", "companions"), list),
    "value_head": bool,
    "hf_config": dict,
}
"""Name of a counter -> type of its value."""

Sources = Mapping[str, Sequence[Region]]


class Restorable(Stateful, Protocol):
    def begin_restore(self, counters: Mapping[str, Any]) -> None: ...

    def state_sources(self, counters: Mapping[str, Any]) -> Sources | None: ...

    def end_restore(self, counters: Mapping[str, Any]) -> None: ...


class ManifestVerifier:
    """Compares bytes that are read with the digests in a checkpoint's manifest."""

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
            raise Damaged(piece_sentence(self.checkpoint.place(f"{self.folder}/{file}"), piece))

    def _entry(self, file: str) -> FileEntry:
        path = f"{self.folder}/{file}"
        if path not in self.checkpoint.manifest.files:
            where = self.checkpoint.place(f"{self.folder}/{INDEX}")
            raise Damaged(f"{where}: names {file}, which is not in the manifest")
        check_size(self.checkpoint, path)
        return self.checkpoint.manifest.files[path]


def open_state(checkpoint: Checkpoint, folder: str) -> DcpFolder:
    """The tensors of one role, verified as they are read; raises Damaged."""
    path = f"{folder}/{INDEX}"
    index, verifier = read_file(checkpoint, path), ManifestVerifier(checkpoint, folder)
    return open_index(checkpoint.manifest, folder, index, checkpoint.place(path).parent, verifier)


def open_index(
    manifest: Manifest,
    folder: str,
    index: bytes,
    place: Path,
    verifier: ManifestVerifier | None = None,
) -> DcpFolder:
    """Parses the index of a role's tensors and compares it with the manifest; raises Damaged."""
    files = manifest.files.items()
    sizes = {
        path.removeprefix(f"{folder}/"): entry.size
        for path, entry in files
        if path.startswith(f"{folder}/")
    }
    try:
        return DcpFolder(place, verifier=verifier, index=index, sizes=sizes)
    except UserError as error:
        raise Damaged(str(error)) from error


def read_counters(checkpoint: Checkpoint, folder: str) -> dict[str, Any]:
    """The saved `Stateful.state_counters`; raises Damaged."""
    path = f"{folder}/{COUNTERS}"
    return checked_counters(read_json(checkpoint, path), checkpoint.place(path))


def checked_counters(counters: dict[str, Any], place: Path) -> dict[str, Any]:
    """Raises Damaged for counters that a run would not save."""
    with reading(place):
        for name, kind in COUNTER_TYPES.items():
            if type(counters[name]) is not kind:
                raise TypeError(f"{name} is a {type(counters[name]).__name__}")
        for text in counters["tags"] + counters["companions"]:
            if not isinstance(text, str):
                raise TypeError(f"{text} is not text")
    return counters


def restore_learner(learner: Restorable, checkpoint: Checkpoint, folder: str) -> dict[str, Any]:
    """Restores a learner; every rank calls it. Returns the counters. After an error the learner can
    be restored again, and until then must not train or save."""
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
    """Fills the tensors in place. Names, shapes and dtypes are checked before any element is
    written; `sources` maps tensors that have other names in the checkpoint."""
    fill_state(tensors, open_state(checkpoint, folder), sources)


def fill_state(
    tensors: Mapping[str, Tensor], saved: DcpFolder, sources: Sources | None = None
) -> None:
    """Like `restore`, from any DCP folder."""
    demands = [
        demand
        for name, tensor in tensors.items()
        if not (name.startswith(OF_A_RANK) and name not in saved.infos)
        for demand in _demands(name, tensor, saved, None if sources is None else sources.get(name))
    ]
    try:
        with from_storage(saved.folder):
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
        raise RunError(f"{saved.where}: holds no {name}, which this run needs")
    if info.shape != shape:
        raise RunError(f"{saved.where}: {name} is {list(info.shape)}, not {list(shape)}")
    if torch.promote_types(info.dtype, dtype) != dtype:
        raise RunError(f"{saved.where}: {name} holds {info.dtype}, and {dtype} would round it")


ACTOR = folder_of("actor")
BATCH_BYTES = 1 << 30
"""Maximum number of bytes read at once; tensors that are contiguous in a file are read together."""


def find_recovery(given: RecoveryPath) -> Checkpoint:
    """The checkpoint of the step in a path, else the newest one. UserError if it does not exist."""
    found = find_checkpoints(given.root)
    if not found:
        raise UserError(Problem(str(given.root), "holds no committed recovery checkpoint"))
    for checkpoint in found:
        if given.step in (None, checkpoint.step):
            return checkpoint
    steps = ", ".join(str(checkpoint.step) for checkpoint in found)
    rule = f"is not committed; the steps {steps} are" if found[1:] else f"only step {steps} is"
    raise UserError(Problem(f"{given.root}: globalstep{given.step}", rule, "name one of them"))


def export_hf(
    checkpoint: Checkpoint,
    target: Path,
    *,
    role: str = ACTOR,
    tag: str = "actor",
    dtype: str | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Writes the folder and verifies every byte; returns the counters of the state."""
    folder = state_folder(role, checkpoint.step)
    if not any(path.startswith(f"{folder}/") for path in checkpoint.manifest.files):
        states = (path.split("/") for path in checkpoint.manifest.files if f"/{STATE}/" in path)
        roles = sorted({"actor" if parts[0] == ACTOR else parts[0] for parts in states})
        rule = f"the checkpoint holds no such role; it has {', '.join(roles)}"
        raise UserError(Problem(f"--role {role}", rule))
    counters = read_counters(checkpoint, folder)
    tags = ["actor", *counters["tags"]]
    if tag not in tags:
        raise UserError(Problem(f"--tag {tag}", f"the checkpoint has {', '.join(tags)}"))
    if counters.get("lora") is not None:
        rule = "has only an adapter, the frozen weights are those of its base"
        remedy = "convert the adapter that the run has saved, with --merge"
        raise UserError(Problem(f"{checkpoint.root}: globalstep{checkpoint.step}", rule, remedy))
    wanted = dtype or counters["dtype"]
    if wanted not in DTYPES:
        raise UserError(Problem(f"--dtype {wanted}", f"use one of {', '.join(DTYPES)}"))
    config, head = counters["hf_config"], counters["value_head"]
    prefix = "model." if tag == "actor" else f"tags.{tag}."
    folders = [Path(path) for path in counters["companions"] if Path(path).is_dir()]
    # The folder of a text tower determines the names of its tensors.
    given = folders[-1] if folders and tower_of(config) else config
    whole = build_whole(given, counters["backend"], model=model, value_head=head)
    save_model(
        whole,
        target,
        dtype=DTYPES[wanted],
        hf_config=config,
        tokenizer_folder=folders[0] if folders else None,
        source_folder=folders[-1] if folders else None,
        weights=_read(open_state(checkpoint, folder), whole, prefix, DTYPES[wanted]),
    )
    return counters


def _read(
    saved: DcpFolder, whole: LanguageModel, prefix: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    sources = whole.weight_map.sources
    regions = {
        name: [replace(region, source=prefix + region.source) for region in source.regions]
        for name, source in sources.items()
    }
    infos = hf_metadata(whole, dtype)
    for names in _batches(infos):
        kept = {n: saved.infos[regions[n][0].source].dtype for n in names}
        batch = {n: torch.empty(sources[n].shape, dtype=kept[n]) for n in names}
        fill_state(batch, saved, regions)
        for name in names:
            yield name, batch.pop(name).to(infos[name].dtype)


def _batches(infos: Mapping[str, TensorInfo]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for name, info in infos.items():
        if batch and size + info.size_bytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += info.size_bytes
    yield batch
