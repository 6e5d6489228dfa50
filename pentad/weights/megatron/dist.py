"""Reads and writes Megatron's torch_dist folders (DCP files) without Megatron.

`common.pt` next to the tensors contains the arguments. Written blocks are whole tensors.
"""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.weights.dcp import DcpFolder
from pentad.weights.megatron.arguments import CHECKPOINT_VERSION, check_args, read_args
from pentad.weights.megatron.layout import INDEX
from pentad.weights.megatron.legacy import EMBEDDING, IGNORED
from pentad.weights.megatron.stored import (
    Form,
    MegatronColumn,
    MegatronReader,
    Spelling,
    StoredPiece,
    TensorPiece,
    dist_pieces,
    extra_states,
    key_shapes,
)
from pentad.weights.pickles import load_rank_file
from pentad.weights.regions import Shape

COMMON, FORMAT = "common.pt", "metadata.json"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine", "opt_param_scheduler")
"""Prefixes of keys of state other than weights."""


class DistFiles(DcpFolder):
    """Reader of the tensors of a torch_dist folder by key."""

    def __init__(self, folder: Path, dims: ModelDims) -> None:
        _check_format(folder)
        super().__init__(folder, lambda key: not key.startswith(NOT_WEIGHTS) and key not in IGNORED)
        common = folder / COMMON
        content = load_rank_file(common) if common.is_file() else {}
        self.args = read_args(content, str(common))
        check_args(self.args, dims, str(common))

    @property
    def vocab_rows(self) -> int:
        if EMBEDDING not in self.infos:
            raise UserError(Problem(f"{self.where}: {EMBEDDING}", "missing"))
        return self.infos[EMBEDDING].shape[0]


def _check_format(folder: Path) -> None:
    """Raises for plain DCP folders (no metadata.json) and other backends (no `.metadata`)."""
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
    """Detects the key format of the folder: the first one with a matching key."""
    for form in ("stacked", "separate", "singleton"):
        wanted = [p for p in dist_pieces(column, form) if p.entry.layer is not None]
        fused = [p for p in wanted if "+" in p.entry.rule.shape]
        if any(key in files.infos for piece in fused for key in (piece.key, *piece.names)):
            return form
    rule = "no key of a decoder layer is there; the folder holds another kind of model"
    raise UserError(Problem(files.where, rule))


def read_dist(files: DistFiles, column: MegatronColumn) -> MegatronReader:
    """Opens the folder under HF names; rejects missing, unknown and misshapen keys by name."""
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
            held.append((piece, stored[piece.key]))
    problems += [
        Problem(f"{files.where}: {key}", "no rule of the map matches it")
        for key in files.infos
        if key not in stored.values()
    ]
    raise_problems(problems)
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
class WrittenBlock:
    """Location of one written block, as recorded in `.metadata`."""

    key: str
    offset: Shape
    shape: Shape
    dtype: str
    start: int
    length: int


def write_block(file: BinaryIO, piece: TensorPiece, tensor: Tensor) -> WrittenBlock:
    """Appends one tensor to a `.distcp` file."""
    shape = ((1,) * len(piece.lead)) + piece.shape
    start = file.tell()
    torch.save(tensor.view(shape), file)
    offset = (*piece.lead, *((0,) * len(piece.shape)))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return WrittenBlock(piece.key, offset, shape, dtype, start, file.tell() - start)


def write_index(
    folder: Path,
    files: Mapping[str, Sequence[WrittenBlock]],
    pieces: Iterable[TensorPiece],
    spelling: Spelling,
) -> None:
    """Writes `.metadata`, `metadata.json` and a file with empty fp8 states."""
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


def _tensor_metadata(item: WrittenBlock, shape: Shape) -> dcp.TensorStorageMetadata:
    dtype = vars(torch)[item.dtype]
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), torch.Size(shape), [])


def extra_state_keys(
    pieces: Iterable[TensorPiece], shapes: Mapping[str, Shape], spelling: Spelling
) -> list[str]:
    """Keys of the fp8 states: one object per layer and expert, numbered as the weights."""
    out: dict[str, None] = {}
    for piece in pieces:
        lead, size = piece.lead or (0,), shapes[piece.key][: len(piece.lead)] or (1,)
        place = f"shard_{'.'.join(map(str, lead))}_{'.'.join(map(str, size))}"
        for state in extra_states([piece.key], spelling):
            out[f"{state}/{place}"] = None
    return list(out)


def write_common(folder: Path, args: Namespace, iteration: int, form: Form) -> None:
    """Writes `common.pt`: the arguments and the key format."""
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
