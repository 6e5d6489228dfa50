"""Megatron's torch_dist folders: plain files of torch.distributed.checkpoint, without Megatron.

`.metadata` says where the blocks of each key lie in the `.distcp` files, each block a torch file
of its own; `common.pt` holds the arguments. Blocks may be cut in any way and are read as they
are; ours are whole tensors.
"""

from __future__ import annotations

import json
import math
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.weights.flow import TensorInfo
from pentad.weights.megatron.arguments import CHECKPOINT_VERSION, check_args, read_args
from pentad.weights.megatron.folders import INDEX
from pentad.weights.megatron.legacy import EMBEDDING, IGNORED
from pentad.weights.megatron.pickles import load_metadata, load_rank_file, load_tensor
from pentad.weights.megatron.stored import (
    Form,
    MegatronColumn,
    MegatronReader,
    Piece,
    Spelling,
    StoredPiece,
    dist_pieces,
    extra_states,
    key_shapes,
)
from pentad.weights.regions import Box, Shape, box_shape, intersect, show

COMMON, FORMAT = "common.pt", "metadata.json"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine", "opt_param_scheduler")
"""How the keys of a training run's other state begin."""
CACHE_BYTES = 256 << 20
"""Blocks kept after reading: one serves all the HF tensors that were fused into it."""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One stored block of a key."""

    box: Box
    file: str
    start: int
    length: int


class DistFiles:
    """The tensors of a torch_dist folder by key, as a reader."""

    def __init__(self, folder: Path, dims: ModelDims) -> None:
        self.folder = folder
        self.where = str(folder)
        _check_format(folder)
        metadata = load_metadata(folder / INDEX)
        common = folder / COMMON
        content = load_rank_file(common) if common.is_file() else {}
        self.args = read_args(content, str(common))
        check_args(self.args, dims, str(common))
        self.infos: dict[str, TensorInfo] = {}
        self.blocks: dict[str, list[StoredBlock]] = {}
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, dcp.TensorStorageMetadata) and not _is_other_state(key):
                self.infos[key] = TensorInfo(tuple(entry.size), entry.properties.dtype)
                self.blocks[key] = self._blocks(key, entry, metadata.storage_data)
        self._check_blocks()
        self._check_files()
        self.cache: OrderedDict[StoredBlock, Tensor] = OrderedDict()

    def _blocks(
        self, key: str, entry: dcp.TensorStorageMetadata, storage: Mapping[Any, Any]
    ) -> list[StoredBlock]:
        out = []
        for chunk in entry.chunks:
            info = storage.get(dcp.MetadataIndex(key, chunk.offsets))
            if not isinstance(info, _StorageInfo):
                rule = f"its block at {list(chunk.offsets)} is in no file"
                raise UserError(Problem(f"{self.where}/{INDEX}: {key}", rule))
            if vars(info).get("transform_descriptors"):
                rule = f"{info.relative_path} is stored through {info.transform_descriptors}"
                raise UserError(Problem(f"{self.where}: {key}", rule, "save it uncompressed"))
            ends = zip(chunk.offsets, chunk.sizes, strict=True)
            box = tuple((start, start + size) for start, size in ends)
            out.append(StoredBlock(box, info.relative_path, info.offset, info.length))
        return out

    def _check_blocks(self) -> None:
        """Every element of a key must be in some file."""
        problems = []
        for key, info in self.infos.items():
            boxes = {block.box for block in self.blocks[key]}
            lacking = math.prod(info.shape) - sum(math.prod(box_shape(box)) for box in boxes)
            if lacking:
                rule = f"{lacking} of {math.prod(info.shape)} elements are in no file"
                problems.append(Problem(f"{self.where}: {key}", rule, "fetch the folder again"))
        if problems:
            raise UserError(problems)

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for block in (block for blocks in self.blocks.values() for block in blocks):
            ends[block.file] = max(ends.get(block.file, 0), block.start + block.length)
        problems = []
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if not path.is_file():
                rule = f"missing, but {INDEX} puts weights in it"
                problems.append(Problem(str(path), rule, "fetch the file again"))
            elif path.stat().st_size < end:
                rule = f"has {path.stat().st_size} bytes, but {INDEX} needs {end}"
                problems.append(Problem(str(path), rule, "fetch or write the file again"))
        if problems:
            raise UserError(problems)

    @property
    def vocab_rows(self) -> int:
        if EMBEDDING not in self.infos:
            raise UserError(Problem(f"{self.where}: {EMBEDDING}", "missing"))
        return self.infos[EMBEDDING].shape[0]

    def read(self, name: str, box: Box) -> Tensor:
        hits = [(b, inside) for b in self.blocks[name] if (inside := intersect(b.box, box))]
        if len(hits) == 1 and hits[0][1] == box:
            return self._open(name, hits[0][0])[_within(box, hits[0][0].box)]
        found = sum(math.prod(box_shape(inside)) for _, inside in hits)
        if found != math.prod(box_shape(box)):
            rule = f"the blocks in its files do not make up {show(box)}"
            raise UserError(Problem(f"{self.where}: {name}", rule, "fetch the folder again"))
        out = torch.empty(box_shape(box), dtype=self.infos[name].dtype)
        for block, inside in hits:
            part = self._open(name, block)[_within(inside, block.box)]
            out[_within(inside, box)] = part
        return out

    def _open(self, key: str, block: StoredBlock) -> Tensor:
        if block in self.cache:
            self.cache.move_to_end(block)
            return self.cache[block]
        tensor = load_tensor(self.folder / block.file, block.start, block.length)
        info, shape = self.infos[key], box_shape(block.box)
        if tuple(tensor.shape) != shape or tensor.dtype != info.dtype:
            rule = f"{block.file} holds {tensor.dtype} {list(tensor.shape)}, {INDEX} says "
            rule += f"{info.dtype} {list(shape)}"
            raise UserError(Problem(f"{self.where}: {key}", rule, "fetch the checkpoint again"))
        self.cache[block] = tensor
        while len(self.cache) > 1 and sum(t.nbytes for t in self.cache.values()) > CACHE_BYTES:
            self.cache.popitem(last=False)
        return tensor


def _within(box: Box, origin: Box) -> tuple[slice, ...]:
    pairs = zip(box, origin, strict=True)
    return tuple(slice(start - zero, stop - zero) for (start, stop), (zero, _) in pairs)


def _is_other_state(key: str) -> bool:
    return key.startswith(NOT_WEIGHTS) or key in IGNORED


def _check_format(folder: Path) -> None:
    """A missing metadata.json is a plain DCP folder; another backend has no `.metadata`."""
    path = folder / FORMAT
    if path.is_file():
        try:
            backend = json.loads(path.read_text()).get("sharded_backend")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise UserError(Problem(str(path), f"is not Megatron's ({error})")) from error
        if backend != "torch_dist":
            rule = f"sharded_backend = {backend}, only torch_dist is read"
            raise UserError(Problem(str(path), rule, "save it again with --ckpt-format torch_dist"))
    if not (folder / INDEX).is_file():
        raise UserError(Problem(str(folder / INDEX), "missing", "fetch the folder again"))


def form_of(files: DistFiles, column: MegatronColumn) -> Form:
    """How the folder's keys are written: the first form of which one is there."""
    for form in ("stacked", "separate", "singleton"):
        wanted = [p for p in dist_pieces(column, form) if p.entry.layer is not None]
        fused = [p for p in wanted if "+" in p.entry.rule.shape]
        if any(key in files.infos for piece in fused for key in (piece.key, *piece.names)):
            return form
    rule = "no key of a decoder layer is there; the folder holds another kind of model"
    raise UserError(Problem(files.where, rule))


def read_dist(files: DistFiles, column: MegatronColumn) -> MegatronReader:
    """The folder under HF names; refuses missing, unknown and misshapen keys, each by name."""
    pieces = dist_pieces(column, form_of(files, column))
    shapes = key_shapes(pieces)
    problems: list[Problem] = []
    held: list[StoredPiece] = []
    stored: dict[str, str] = {}
    for piece in pieces:
        if piece.key not in stored:
            names = [key for key in (piece.key, *piece.names) if key in files.infos]
            stored[piece.key] = names[0] if names else ""
            problems += _key_problems(files, piece.key, stored[piece.key], shapes[piece.key])
        if stored[piece.key]:
            held.append(StoredPiece(piece, stored[piece.key]))
    problems += [
        Problem(f"{files.where}: {key}", "no rule of the map knows it")
        for key in files.infos
        if key not in stored.values()
    ]
    if problems:
        raise UserError(problems)
    return MegatronReader(files.where, column, files, held)


def _key_problems(files: DistFiles, key: str, stored: str, wanted: Shape) -> list[Problem]:
    if not stored:
        return [Problem(f"{files.where}: {key}", f"missing; the model needs it as {list(wanted)}")]
    shape = files.infos[stored].shape
    if shape != wanted:
        rule = f"shape {list(shape)}, but the config makes it {list(wanted)}"
        return [Problem(f"{files.where}: {stored}", rule)]
    return []


@dataclass(frozen=True, slots=True)
class Item:
    """Where one block was written: what `.metadata` will say of it."""

    key: str
    offset: Shape
    shape: Shape
    dtype: str
    start: int
    length: int


def write_block(file: BinaryIO, piece: Piece, tensor: Tensor) -> Item:
    """Appends one tensor to a `.distcp` file."""
    shape = ((1,) * len(piece.lead)) + piece.shape
    start = file.tell()
    torch.save(tensor.view(shape), file)
    offset = (*piece.lead, *((0,) * len(piece.shape)))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Item(piece.key, offset, shape, dtype, start, file.tell() - start)


def write_index(
    folder: Path,
    files: Mapping[str, Sequence[Item]],
    pieces: Iterable[Piece],
    spelling: Spelling,
) -> None:
    """`.metadata` and `metadata.json`, and the empty fp8 states in a file of their own."""
    pieces = list(pieces)
    shapes = key_shapes(pieces)
    tensors: dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, items in files.items():
        for item in items:
            entry = tensors.setdefault(item.key, _tensor_metadata(item, shapes[item.key]))
            assert isinstance(entry, dcp.TensorStorageMetadata)
            chunk = dcp.ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.shape))
            entry.chunks.append(chunk)
            index = dcp.MetadataIndex(item.key, item.offset)
            storage[index] = _StorageInfo(name, item.start, item.length)
    name = f"__{len(files)}_0.distcp"
    with (folder / name).open("wb") as file:
        for key in extra_state_keys(pieces, shapes, spelling):
            start = file.tell()
            torch.save([None], file)
            tensors[key] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(key)] = _StorageInfo(name, start, file.tell() - start)
    metadata = dcp.Metadata(dict(tensors), storage_data=storage, storage_meta=dcp.StorageMeta())
    (folder / INDEX).write_bytes(pickle.dumps(metadata))
    (folder / FORMAT).write_text(json.dumps(BACKEND))


def _tensor_metadata(item: Item, shape: Shape) -> dcp.TensorStorageMetadata:
    dtype = vars(torch)[item.dtype]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(shape), [])


def extra_state_keys(
    pieces: Iterable[Piece], shapes: Mapping[str, Shape], spelling: Spelling
) -> list[str]:
    """The keys of the fp8 states: one object per layer and expert, numbered like its weight."""
    out: dict[str, None] = {}
    for piece in pieces:
        lead, size = piece.lead or (0,), shapes[piece.key][: len(piece.lead)] or (1,)
        place = f"shard_{'.'.join(map(str, lead))}_{'.'.join(map(str, size))}"
        for state in extra_states([piece.key], spelling):
            out[f"{state}/{place}"] = None
    return list(out)


def write_common(folder: Path, args: Namespace, iteration: int, form: Form) -> None:
    """`common.pt`: the arguments, and how the keys are written."""
    content = {
        "args": args,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
        "content_metadata": {
            "non_homogeneous_layers": form != "stacked",
            "singleton_local_shards": form == "singleton",
        },
    }
    torch.save(content, folder / COMMON)
