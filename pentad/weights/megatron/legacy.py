"""Reads and writes Megatron's legacy folders: one pickled torch file per rank."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.weights.megatron.arguments import (
    CHECKPOINT_VERSION,
    check_args,
    claimed_axes,
    read_args,
)
from pentad.weights.megatron.layout import (
    RANK_FILE,
    RANK_FOLDER,
    FoundRank,
    MegatronLayout,
    check_rank_files,
    infer_layout,
)
from pentad.weights.megatron.stored import (
    EXTRA_STATE,
    MegatronColumn,
    MegatronReader,
    Spelling,
    StoredPiece,
    TensorPiece,
    extra_states,
    rank_pieces,
)
from pentad.weights.pickles import load_rank_file
from pentad.weights.regions import Box, slices
from pentad.weights.transfer import TensorInfo

LAYERS = "decoder.layers."
EMBEDDING = "embedding.word_embeddings.weight"
EXPERT_FC1 = re.compile(r"\.experts\.(local_experts\.\d+\.)?linear_fc1\.weight\d*$")
IGNORED = ("rotary_pos_emb.inv_freq",)
"""Buffers that follow from the configuration."""


class LegacyFiles:
    """Reader of the tensors in all rank files of a checkpoint; ids are folder:chunk:name."""

    def __init__(self, folder: Path, dims: ModelDims) -> None:
        self.folder = folder
        self.where = str(folder)
        contents = self._load()
        first = next(iter(contents.values()))
        self.args = read_args(first, self.where)
        check_args(self.args, dims, self.where)
        self._check_claims(contents.keys())
        self.chunks = {name: chunks_of(content) for name, content in contents.items()}
        rule = "has neither model nor model0: no weights are in it"
        empty = [name for name, chunks in self.chunks.items() if not chunks]
        raise_problems(Problem(f"{self.where}/{name}", rule) for name in empty)
        self.layout = self._layout(dims)
        self.tensors = {
            f"{name}:{chunk}:{key}": value
            for name, chunks in self.chunks.items()
            for chunk, tensors in chunks.items()
            for key, value in tensors.items()
            if isinstance(value, Tensor) and key not in IGNORED
            if EXTRA_STATE not in key.rpartition(".")[2]
        }
        self.infos = {n: TensorInfo(tuple(t.shape), t.dtype) for n, t in self.tensors.items()}

    def _load(self) -> dict[str, dict[str, Any]]:
        names = sorted(p.name for p in self.folder.iterdir() if RANK_FOLDER.fullmatch(p.name))
        if not names:
            raise UserError(Problem(self.where, "holds no mp_rank folder"))
        missing = [n for n in names if not (self.folder / n / RANK_FILE).is_file()]
        if missing:
            rule = f"no {RANK_FILE} in it"
            raise UserError([Problem(str(self.folder / name), rule) for name in missing])
        return {name: load_rank_file(self.folder / name / RANK_FILE) for name in names}

    def _check_claims(self, present: Set[str]) -> None:
        """Raises unless the folders match the layout in the arguments."""
        claimed = claimed_axes(self.args)
        if not {"tp", "pp"} <= claimed.keys():
            return
        tp, ep, etp = claimed["tp"], claimed.get("ep", 1), claimed["etp"]
        layout = MegatronLayout(tp=tp, pp=claimed["pp"], ep=ep, etp=etp)
        said = f"the arguments in its files say {layout}"
        problems = [
            Problem(f"{self.where}/{name}", f"missing: {said}", "fetch the folder again")
            for name in sorted(layout.folders() - present)
        ]
        problems += [
            Problem(f"{self.where}/{name}", f"does not belong there: {said}", "remove it")
            for name in sorted(present - layout.grid())
        ]
        raise_problems(problems)

    def _layout(self, dims: ModelDims) -> MegatronLayout:
        found = {name: _found(name, chunks) for name, chunks in self.chunks.items()}
        layout = infer_layout(self.where, found, dims)
        claimed = {**claimed_axes(self.args), **({} if dims.num_experts else {"etp": 1})}
        problems = []
        for axis, size in layout.sizes.items():
            if self.args and claimed.get(axis, size or 1) != (size or 1):
                rule = f"its arguments say {axis} = {claimed[axis]}, its files hold {size or 1}"
                problems.append(Problem(self.where, rule, "fetch the folder again"))
        for name in sorted(layout.folders() - self.chunks.keys()):
            rule = f"missing: the other folders are of a layout with {layout}"
            problems.append(Problem(f"{self.where}/{name}", rule, "fetch the folder again"))
        raise_problems(problems)
        check_rank_files(layout)
        return layout

    @property
    def vocab_rows(self) -> int:
        """Vocabulary rows including padding, which depends on the writer of the checkpoint."""
        rows = {}
        for rank in self.layout.ranks():
            name = f"{self.layout.folder(rank)}:{self.layout.chunks()[0]}:{EMBEDDING}"
            if rank.pp == 0 and name not in self.infos:
                raise UserError(Problem(f"{self.where}: {name}", "missing"))
            if rank.pp == 0:
                rows[rank.tp] = self.infos[name].shape[0]
        return sum(rows.values())

    def read(self, name: str, box: Box) -> Tensor:
        return self.tensors[name][slices(box)]


def chunks_of(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The model chunks of a rank file by key."""
    if isinstance(content.get("model"), dict):
        return {"model": content["model"]}
    out: dict[str, dict[str, Any]] = {}
    while isinstance(content.get(f"model{len(out)}"), dict):
        out[f"model{len(out)}"] = content[f"model{len(out)}"]
    return out


def _found(name: str, chunks: Mapping[str, Mapping[str, Any]]) -> FoundRank:
    match = RANK_FOLDER.fullmatch(name)
    assert match is not None, "only such folders were opened"
    tp, second, third = (None if part is None else int(part) for part in match.groups())
    layers = []
    rows = None
    for tensors in chunks.values():
        numbers = {key.split(".")[2] for key in tensors if key.startswith(LAYERS)}
        layers.append(len(numbers))
        for key, value in tensors.items():
            if EXPERT_FC1.search(key):
                rows = value.shape[0]
                break
    return FoundRank((tp or 0, second, third), tuple(layers), rows)


def read_legacy(files: LegacyFiles, column: MegatronColumn) -> MegatronReader:
    """Opens the folder under HF names; rejects missing, unknown and misshapen tensors by name."""
    problems: list[Problem] = []
    held: list[StoredPiece] = []
    used: set[str] = set()
    for (rank, chunk), pieces in rank_pieces(column, files.layout).items():
        prefix = f"{files.layout.folder(rank)}:{chunk}:"
        for piece in pieces:
            names = [prefix + key for key in (piece.key, *piece.names)]
            stored = next((name for name in names if name in files.infos), None)
            if stored is None:
                if not piece.entry.is_copy:
                    rule = f"missing; the layout ({files.layout}) puts {list(piece.shape)} there"
                    problems.append(Problem(f"{files.where}: {names[0]}", rule))
                continue
            used.add(stored)
            shape = files.infos[stored].shape
            if shape != piece.shape:
                rule = f"shape {list(shape)}, but config and layout make it {list(piece.shape)}"
                problems.append(Problem(f"{files.where}: {stored}", rule))
            held.append((piece, stored))
    ranks = files.layout.folders()
    for name in files.infos:
        # With tp and ep, some files are replicas that no rank of this layout reads.
        if name not in used and name.partition(":")[0] in ranks:
            rule = "no rule of the map matches it"
            problems.append(Problem(f"{files.where}: {name}", rule))
    raise_problems(problems)
    return MegatronReader(files.where, column, files, held)


def write_rank_file(
    path: Path,
    chunks: Mapping[str, Mapping[str, Tensor]],
    args: Namespace,
    *,
    iteration: int,
    spelling: Spelling,
) -> None:
    """Writes one rank's file in Megatron's format, without optimizer."""
    content: dict[str, object] = {
        "args": args,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
    }
    for chunk, tensors in chunks.items():
        states = dict.fromkeys(extra_states(tensors, spelling))
        content[chunk] = {**tensors, **states}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        torch.save(content, file)


def pieces_of_file(
    column: MegatronColumn, layout: MegatronLayout, spelling: Spelling
) -> dict[str, dict[str, Sequence[TensorPiece]]]:
    """Maps each file to its chunks and their tensor pieces."""
    out: dict[str, dict[str, Sequence[TensorPiece]]] = {}
    for (rank, chunk), pieces in rank_pieces(column, layout, spelling).items():
        out.setdefault(f"{layout.folder(rank)}/{RANK_FILE}", {})[chunk] = pieces
    return out
