"""Stored form of Megatron's tensors: pieces, their names, and a reader over them.

A `TensorPiece` is one tensor of a rank file, or one part of a torch_dist key, with the blocks of
the column's tensor that it contains. Both directions use the same pieces: written, a piece is
filled from the regions of its blocks; read, the blocks are found in the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pentad.core.errors import Problem, UserError, raise_problems
from pentad.weights.cuts import CutPlan, cut_entry
from pentad.weights.map import Entry, Rule, WeightMap
from pentad.weights.megatron.layout import MegatronLayout, MegatronRank
from pentad.weights.regions import (
    Box,
    DimRun,
    Lookup,
    Region,
    Shape,
    box_shape,
    clip_all,
    coverage_fault,
    full_box,
    join,
)
from pentad.weights.transfer import Reader, TensorInfo, source_block, target_block

Spelling = Literal["te", "local"]
"""Which layer spec names the tensors: Transformer Engine's, or Megatron's own modules."""
Form = Literal["stacked", "separate", "singleton"]
"""torch_dist keys: all layers in one key, a key per layer, or also one per expert and GLU half."""

SEQUENTIAL = ".local_experts.{e}."
"""Part of the names of experts that are separate modules."""
EXPERT_KEY: dict[Form, str] = {
    "stacked": ".experts.",
    "separate": ".experts.",
    "singleton": ".experts.{e}.",
}
"""Name in a rank file -> replacement in torch_dist."""
FUSED_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""The torch_dist keys of the separate norms of Megatron's own spec, in mixture layers too."""

LINEARS = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
NORMS = {"q_layernorm", "k_layernorm", "pre_mlp_layernorm", "final_layernorm"}
EXTRA_STATE = "_extra_state"
"""Key of a module's fp8 state. It is empty here, but strict loading requires the key."""
STATEFUL: dict[Spelling, set[str]] = {"te": LINEARS | NORMS, "local": LINEARS}
"""Modules with fp8 state. Transformer Engine's attention core, without weights, has one, too."""


@dataclass(frozen=True)
class MegatronColumn:
    """A model's Megatron tensors mapped to HF-on-disk tensors, with their sharding."""

    map: WeightMap
    plan: CutPlan


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One stored tensor, and the blocks of a column's tensor in it."""

    key: str
    """Its stored name; in torch_dist a key may contain several pieces."""
    lead: Shape
    """Index along the leading axes that a torch_dist key adds (layer, expert)."""
    shape: Shape
    """Shape without those axes."""
    entry: Entry
    blocks: tuple[tuple[Box, Shape], ...]
    """(block of the column's tensor, its start in this one)."""
    is_copy: bool = False
    """Whether another piece stores the same elements."""
    names: tuple[str, ...] = ()
    """Keys that other layer specs use for it."""

    @property
    def fills(self) -> list[Region]:
        """This tensor as regions of HF-on-disk tensors."""
        return [
            part.moved(at) for box, at in self.blocks for part in clip_all(self.entry.regions, box)
        ]

    def gives(self, key: str, key_shape: Shape) -> list[Region]:
        """The column's tensor as regions of the stored one."""
        shift = len(self.lead)
        return [
            Region(
                key,
                key_shape,
                (*self.lead, *at),
                tuple(start for start, _ in box),
                tuple(
                    DimRun(dim + shift, dim, stop - start) for dim, (start, stop) in enumerate(box)
                ),
            )
            for box, at in self.blocks
        ]


def rank_pieces(
    column: MegatronColumn, layout: MegatronLayout, spelling: Spelling = "te"
) -> dict[tuple[MegatronRank, str], list[TensorPiece]]:
    """Maps (rank, chunk) to its pieces, under the rank's local layer and expert numbers."""
    out: dict[tuple[MegatronRank, str], list[TensorPiece]] = {}
    seen: set[tuple[str, tuple[tuple[Box, Shape], ...]]] = set()
    local_experts = column.map.dims.num_experts // layout.ep
    by_stage = _by_stage(column.map, layout)
    for rank in layout.ranks():
        coords = layout.coords(rank)
        for number, chunk in enumerate(layout.chunks()):
            layers = layout.layers(rank.pp, number)
            pieces = out.setdefault((rank, chunk), [])
            for entry in by_stage[number * layout.pp + rank.pp]:
                index = {}
                if entry.layer is not None:
                    index["i"] = entry.layer - layers.start
                if entry.expert is not None:
                    owner, index["e"] = divmod(entry.expert, local_experts)
                    if owner != rank.ep:
                        continue
                local = cut_entry(entry, column.plan, coords)
                name, others = _spell(entry.rule, spelling)
                once = (entry.name, local.boxes)
                piece = TensorPiece(
                    name.format(**index),
                    (),
                    local.shape,
                    entry,
                    local.boxes,
                    entry.is_copy or once in seen,
                    tuple(other.format(**index) for other in others),
                )
                seen.add(once)
                pieces.append(piece)
    return out


def _spell(rule: Rule, spelling: Spelling) -> tuple[str, tuple[str, ...]]:
    """The name pattern in a rank file, and the patterns of other layer specs."""
    every = (rule.target, *rule.alias)
    name = rule.alias[0] if spelling == "local" and rule.alias else rule.target
    return name, tuple(other for other in every if other != name)


def _by_stage(column: WeightMap, layout: MegatronLayout) -> list[list[Entry]]:
    """The tensors of every stage; a tied head is also on the last stage if there are several."""
    out: list[list[Entry]] = [[] for _ in layout.stages]
    stage_of = [stage for stage, count in enumerate(layout.stages) for _ in range(count)]
    last = len(layout.stages) - 1
    entries = list(column.entries.values())
    first_layer = next(n for n, entry in enumerate(entries) if entry.layer is not None)
    for number, entry in enumerate(entries):
        if entry.layer is not None:
            out[stage_of[entry.layer]].append(entry)
        elif number < first_layer:
            out[0].append(entry)
        elif not (entry.is_copy and layout.pp == 1):
            out[last].append(entry)
    return out


def dist_pieces(column: MegatronColumn, form: Form, spelling: Spelling = "te") -> list[TensorPiece]:
    """The pieces of a torch_dist folder, which are whole tensors."""
    out = []
    for entry in column.map.entries.values():
        if entry.is_copy:
            continue
        name, others = _dist_names(entry, form, spelling)
        lead = tuple(
            index
            for index in (
                entry.layer if form == "stacked" else None,
                entry.expert if form != "singleton" else None,
            )
            if index is not None
        )
        whole = ((full_box(entry.shape), (0,) * len(entry.shape)),)
        piece = TensorPiece(name, lead, entry.shape, entry, whole, names=others)
        halves = form == "singleton" and "+" in entry.rule.shape.split()[0]
        out += _halves(piece) if halves else [piece]
    return out


def _dist_names(entry: Entry, form: Form, spelling: Spelling) -> tuple[str, tuple[str, ...]]:
    """The key in torch_dist, and the keys that other layer specs use."""
    te, local = entry.rule.target, _spell(entry.rule, "local")[0]
    for norm, fused in FUSED_NORMS.items():
        local = local.replace(norm, fused)
    if entry.expert is not None:
        assert SEQUENTIAL in local, f"{te}: an expert's rule needs an alias with {SEQUENTIAL}"
        te = local = local.replace(SEQUENTIAL, EXPERT_KEY[form])
    chosen, other = (te, local) if spelling == "te" else (local, te)
    index = {"i": entry.layer, "e": entry.expert}
    if form == "stacked":
        chosen, other = chosen.replace(".{i}.", "."), other.replace(".{i}.", ".")
    names = () if other == chosen else (other.format(**index),)
    return chosen.format(**index), names


def _halves(piece: TensorPiece) -> list[TensorPiece]:
    height = piece.shape[0] // 2
    shape = (height, *piece.shape[1:])
    out = []
    for half, suffix in enumerate(("_w", "_v")):
        box = ((half * height, (half + 1) * height), *full_box(piece.shape[1:]))
        block = ((box, (0,) * len(shape)),)
        names = tuple(name + suffix for name in piece.names)
        key = piece.key + suffix
        out.append(replace(piece, key=key, shape=shape, blocks=block, names=names))
    return out


def key_shapes(pieces: Iterable[TensorPiece]) -> dict[str, Shape]:
    """Shape of every torch_dist key: the shape of its pieces plus stacked axes."""
    leads: dict[str, Shape] = {}
    shapes: dict[str, Shape] = {}
    for piece in pieces:
        known = leads.get(piece.key, (0,) * len(piece.lead))
        leads[piece.key] = tuple(max(a, b + 1) for a, b in zip(known, piece.lead, strict=True))
        shapes[piece.key] = piece.shape
    return {key: (*leads[key], *shape) for key, shape in shapes.items()}


def extra_states(keys: Iterable[str], spelling: Spelling) -> list[str]:
    """Keys of the fp8 states of the modules that own these tensors."""
    modules: dict[str, None] = {}
    for key in keys:
        module, _, leaf = key.rpartition(".")
        kind = module.rpartition(".")[2]
        if not leaf.startswith("weight"):
            continue
        if kind in STATEFUL[spelling]:
            modules[module] = None
        if kind == "linear_qkv" and spelling == "te":
            modules[module.removesuffix("linear_qkv") + "core_attention"] = None
    return [f"{module}.{EXTRA_STATE}" for module in modules]


StoredPiece = tuple[TensorPiece, str]
"""A piece and the stored tensor in which it was found."""


class MegatronReader:
    """Implements `weights.transfer.Reader` over the stored tensors of a checkpoint.

    Replicated elements are read from the first rank and compared with the others. If ranks differ,
    the checkpoint is rejected as broken.
    """

    def __init__(
        self, where: str, column: MegatronColumn, files: Reader, held: Iterable[StoredPiece]
    ) -> None:
        self.where = where
        self.column = column
        self.files = files
        parts: dict[str, list[Region]] = {}
        copies: dict[str, list[Region]] = {}
        for piece, stored in held:
            regions = piece.gives(stored, files.infos[stored].shape)
            entry = piece.entry
            if piece.is_copy:
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
    """The memory as integers, so that NaN equals itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])


def _check_dtypes(where: str, files: Reader, parts: Mapping[str, list[Region]]) -> None:
    for name, regions in parts.items():
        kinds = {files.infos[region.source].dtype: region.source for region in regions}
        if len(kinds) > 1:
            said = " and ".join(f"{dtype} in {key}" for dtype, key in kinds.items())
            raise UserError(Problem(f"{where}: {name}", f"is {said}", "save it in one type"))


def _check_coverage(where: str, column: MegatronColumn, parts: Mapping[str, list[Region]]) -> None:
    problems = []
    for name, entry in column.map.entries.items():
        if entry.is_copy:
            continue
        fault = coverage_fault([region.target_box for region in parts.get(name, ())], entry.shape)
        if fault:
            problems.append(Problem(f"{where}: {name}", fault, "fetch the checkpoint again"))
    raise_problems(problems)
