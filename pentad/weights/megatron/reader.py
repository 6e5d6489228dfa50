"""A Megatron checkpoint read under HF-on-disk names, any block of any tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pentad.core.errors import Problem, UserError
from pentad.weights.flow import Reader, TensorInfo, source_block, target_block
from pentad.weights.megatron.stored import Column, Piece
from pentad.weights.regions import Box, Lookup, Region, box_shape, clip_all, coverage_fault, join


@dataclass(frozen=True, slots=True)
class Held:
    """A piece and the stored tensor in which it was found."""

    piece: Piece
    stored: str


class MegatronReader:
    """Implements `weights.flow.Reader` over the stored tensors of a checkpoint.

    Elements that several ranks hold are read from the first and compared with the others: ranks
    that disagree are a broken checkpoint, whichever of them is taken.
    """

    def __init__(self, where: str, column: Column, files: Reader, held: Iterable[Held]) -> None:
        self.where = where
        self.column = column
        self.files = files
        parts: dict[str, list[Region]] = {}
        copies: dict[str, list[Region]] = {}
        for one in held:
            regions = one.piece.gives(one.stored, files.infos[one.stored].shape)
            entry = one.piece.entry
            if one.piece.is_copy:
                original = entry.rule.tied if entry.is_copy else entry.name
                copies.setdefault(original, []).extend(regions)
            else:
                parts.setdefault(entry.name, []).extend(regions)
        _check_coverage(where, column, parts)
        _check_dtypes(where, files, parts)
        self.parts = {name: Lookup(regions) for name, regions in parts.items()}
        self.copies = {name: Lookup(regions) for name, regions in copies.items()}
        self.infos = {
            name: TensorInfo(source.shape, self._dtype(source.regions))
            for name, source in column.map.sources.items()
        }

    def _dtype(self, regions: Iterable[Region]) -> torch.dtype:
        first = next(iter(regions))
        return self.files.infos[self.parts[first.source].regions[0].source].dtype

    def read(self, name: str, box: Box) -> Tensor:
        wanted = clip_all(self.column.map.sources[name].regions, box)
        out = torch.empty(box_shape(box), dtype=self.infos[name].dtype)
        for region in wanted:
            for part in join([region], self.parts):
                target_block(out, part).copy_(self._block(part))
            if region.source in self.copies:
                for part in join([region], self.copies):
                    self._compare(name, part, out)
        return out

    def _block(self, part: Region) -> Tensor:
        piece = self.files.read(part.source, part.source_box)
        return source_block(piece, part.alone)

    def _compare(self, name: str, part: Region, out: Tensor) -> None:
        if not torch.equal(_bits(target_block(out, part)), _bits(self._block(part))):
            rule = f"ranks disagree: {part.source} holds other values for {name} than the first"
            raise UserError(Problem(self.where, rule, "save or fetch the checkpoint again"))


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: a NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])


def _check_dtypes(where: str, files: Reader, parts: Mapping[str, list[Region]]) -> None:
    for name, regions in parts.items():
        kinds = {files.infos[region.source].dtype: region.source for region in regions}
        if len(kinds) > 1:
            said = " and ".join(f"{dtype} in {key}" for dtype, key in kinds.items())
            raise UserError(Problem(f"{where}: {name}", f"is {said}", "save it in one type"))


def _check_coverage(where: str, column: Column, parts: Mapping[str, list[Region]]) -> None:
    problems = []
    for name, entry in column.map.entries.items():
        if entry.is_copy:
            continue
        fault = coverage_fault([region.target_box for region in parts.get(name, ())], entry.shape)
        if fault:
            problems.append(Problem(f"{where}: {name}", fault, "fetch the checkpoint again"))
    if problems:
        raise UserError(problems)
