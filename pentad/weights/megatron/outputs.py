"""Output formats of a conversion. Each output lists its files and writes each one independently.

Sources are read under HF-on-disk names, so each output works with every source format. A file is
read back after writing and compared with the written tensors.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from pentad.core.device import DTYPES
from pentad.core.errors import Problem, RunError, UserError
from pentad.core.folders import INDEX as HF_INDEX
from pentad.weights.files import checksum
from pentad.weights.hf import METADATA, HfFolder, bytes_of, write_file, write_json
from pentad.weights.map import WeightMap
from pentad.weights.megatron.dist import WrittenBlock, write_block, write_common, write_index
from pentad.weights.megatron.layout import MegatronLayout
from pentad.weights.megatron.legacy import chunks_of, pieces_of_file, write_rank_file
from pentad.weights.megatron.stored import Form, MegatronColumn, Spelling, TensorPiece, dist_pieces
from pentad.weights.pickles import load_rank_file, load_tensor
from pentad.weights.regions import full_box
from pentad.weights.transfer import (
    Reader,
    TensorInfo,
    check_finite,
    is_finite,
    source_block,
    target_block,
    written_dtype,
)

Notes = list[WrittenBlock]
"""Information on a written file for `Output.finish`."""

WIDER = "give a wider type with --dtype"


class Output(Protocol):
    """Interface to the files of a converted checkpoint."""

    @property
    def files(self) -> Mapping[str, int]:
        """Relative path -> bytes of tensors in the file."""
        ...

    def write(self, name: str, path: Path) -> Notes:
        """Writes one of the files to `path` and reads it back."""
        ...

    def finish(self, folder: Path, notes: Mapping[str, Notes]) -> None:
        """Writes the common files (index, config) after all others."""
        ...


@dataclass(frozen=True)
class Filler:
    """Builds stored tensors from a reader of HF tensors."""

    reader: Reader
    dtype: torch.dtype | None
    """Target dtype, except for tensors with a fixed dtype; None: no cast."""

    def dtype_of(self, piece: TensorPiece) -> torch.dtype:
        """The common dtype of a piece's source tensors; raises if they differ."""
        if self.dtype is not None:
            return DTYPES[piece.entry.rule.dtype] if piece.entry.rule.dtype else self.dtype
        kinds = {self.reader.infos[r.source].dtype: r.source for r in piece.entry.regions}
        if len(kinds) > 1:
            said = " and ".join(f"{name} ({dtype})" for dtype, name in kinds.items())
            rule = f"Megatron keeps {said} in one tensor, {piece.entry.name}"
            raise UserError(Problem(self.reader.where, rule, "give one type with --dtype"))
        return next(iter(kinds))

    def size_bytes(self, piece: TensorPiece) -> int:
        return TensorInfo(piece.shape, self.dtype_of(piece)).size_bytes

    def fill(self, piece: TensorPiece) -> Tensor:
        out = torch.zeros(piece.shape, dtype=self.dtype_of(piece))
        for region in piece.fills:
            block = self.reader.read(region.source, region.source_box)
            target_block(out, region).copy_(source_block(block, region.alone))
        if not is_finite(out):
            for part in piece.fills:
                block = target_block(out, part)
                check_finite(self.reader, part.source, part.source_box, block, WIDER)
        return out


def _check_back(path: Path, written: Mapping[str, int], found: Mapping[str, int]) -> None:
    wrong = [name for name in written if written[name] != found.get(name)]
    if wrong or written.keys() != found.keys():
        name = wrong[0] if wrong else "a tensor"
        raise RunError(f"{path}: {name} does not read back as written; the disk is at fault")


def _sum(tensor: Tensor) -> int:
    return checksum(bytes_of(tensor))


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@dataclass
class LegacyOutput:
    """A legacy checkpoint: one file per rank."""

    column: MegatronColumn
    layout: MegatronLayout
    filler: Filler
    args: Namespace
    iteration: int | None
    spelling: Spelling

    def __post_init__(self) -> None:
        self.pieces = pieces_of_file(self.column, self.layout, self.spelling)
        self.files = {
            name: sum(self.filler.size_bytes(p) for pieces in chunks.values() for p in pieces)
            for name, chunks in self.pieces.items()
        }

    def write(self, name: str, path: Path) -> Notes:
        chunks = {
            chunk: {piece.key: self.filler.fill(piece) for piece in pieces}
            for chunk, pieces in self.pieces[name].items()
        }
        written = {f"{c}.{key}": _sum(t) for c, ts in chunks.items() for key, t in ts.items()}
        iteration = self.iteration or 0
        write_rank_file(path, chunks, self.args, iteration=iteration, spelling=self.spelling)
        _sync(path)
        del chunks
        back = chunks_of(load_rank_file(path))
        pairs = [(f"{c}.{key}", t) for c, ts in back.items() for key, t in ts.items()]
        _check_back(path, written, {name: _sum(t) for name, t in pairs if t is not None})
        return []

    def finish(self, folder: Path, notes: Mapping[str, Notes]) -> None:
        pass


@dataclass
class DistOutput:
    """A torch_dist checkpoint: whole tensors in layer order, in files of limited size."""

    column: MegatronColumn
    filler: Filler
    args: Namespace
    iteration: int | None
    form: Form
    spelling: Spelling
    shard_bytes: int

    def __post_init__(self) -> None:
        self.all = dist_pieces(self.column, self.form, self.spelling)
        _check_one_dtype(self.filler, self.all)
        self.pieces: dict[str, list[TensorPiece]] = {}
        self.files: dict[str, int] = {}
        name, filled = "", self.shard_bytes
        for piece in self.all:
            size = self.filler.size_bytes(piece)
            if filled + size > self.shard_bytes and filled > 0:
                name, filled = f"__{len(self.files)}_0.distcp", 0
            self.pieces.setdefault(name, []).append(piece)
            filled += size
            self.files[name] = filled

    def write(self, name: str, path: Path) -> Notes:
        items, written = [], {}
        with path.open("wb") as file:
            for piece in self.pieces[name]:
                tensor = self.filler.fill(piece)
                items.append(write_block(file, piece, tensor))
                written[str(items[-1].start)] = _sum(tensor)
        _sync(path)
        back = ((item.start, load_tensor(path, item.start, item.length)) for item in items)
        _check_back(path, written, {str(start): _sum(tensor) for start, tensor in back})
        return items

    def finish(self, folder: Path, notes: Mapping[str, Notes]) -> None:
        write_index(folder, notes, self.all, self.spelling)
        write_common(folder, self.args, self.iteration or 0, self.form)


def _check_one_dtype(filler: Filler, pieces: Iterable[TensorPiece]) -> None:
    """Raises unless all layers of a stacked key have one dtype."""
    kinds: dict[str, tuple[torch.dtype, str]] = {}
    for piece in pieces:
        dtype = filler.dtype_of(piece)
        known, name = kinds.setdefault(piece.key, (dtype, piece.entry.name))
        if known != dtype:
            rule = f"torch_dist keeps {name} ({known}) and {piece.entry.name} ({dtype}) in one key"
            raise UserError(Problem(filler.reader.where, rule, "give one type with --dtype"))


@dataclass(frozen=True)
class HfFile:
    """The tensors of one safetensors file, in order."""

    name: str
    tensors: tuple[str, ...]
    metadata: Mapping[str, str]


class HfOutput:
    """A HF folder; it keeps the file split of the original HF folder if there is one."""

    def __init__(self, files: Sequence[HfFile], filler: Filler, weight_map: WeightMap) -> None:
        self.plan = {file.name: file for file in files}
        self.reader = filler.reader
        self.map = weight_map
        self.infos = {
            file.name: {name: self._info(name, filler.dtype) for name in file.tensors}
            for file in files
        }
        self.files = {
            name: sum(info.size_bytes for info in infos.values())
            for name, infos in self.infos.items()
        }

    def _info(self, name: str, dtype: torch.dtype | None) -> TensorInfo:
        info = self.reader.infos[self._source(name)]
        known = self.map.sources.get(name)
        cast = dtype if known is None else written_dtype(known, dtype)
        return TensorInfo(info.shape, cast or info.dtype)

    def _source(self, name: str) -> str:
        """The reader's name for a tensor; a tied tensor has the same source."""
        return name if name in self.reader.infos else self.map.tied[name]

    def _read(self, name: str, info: TensorInfo) -> Tensor:
        source, box = self._source(name), full_box(info.shape)
        whole = self.reader.read(source, box).to(info.dtype)
        check_finite(self.reader, source, box, whole, WIDER)
        return whole

    def write(self, name: str, path: Path) -> Notes:
        infos = self.infos[name]
        pairs = ((key, self._read(key, info)) for key, info in infos.items())
        write_file(path, pairs, infos, self.plan[name].metadata)
        return []

    def finish(self, folder: Path, notes: Mapping[str, Notes]) -> None:
        if len(self.plan) == 1:
            return
        weight_map = {key: name for name, infos in self.infos.items() for key in infos}
        index = {"metadata": {"total_size": sum(self.files.values())}, "weight_map": weight_map}
        write_json(folder / HF_INDEX, index)


def hf_files(plan: Mapping[str, Sequence[str]]) -> list[HfFile]:
    return [HfFile(name, tuple(tensors), METADATA) for name, tensors in plan.items()]


def hf_files_of(reader: HfFolder) -> list[HfFile]:
    """The existing file split of a HF folder."""
    names: dict[Path, list[str]] = {}
    for name, path in reader.file_of.items():
        names.setdefault(path, []).append(name)
    out = []
    for path, tensors in names.items():
        with safe_open(path, framework="pt") as file:
            out.append(HfFile(path.name, tuple(tensors), file.metadata() or {}))
    return out
