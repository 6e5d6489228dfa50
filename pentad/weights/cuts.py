"""Sharding of tensors in a layout: the local part of every tensor of a map, from the parallel plan.

The plan names size symbols (`{"Q": "tp", "E": "ep"}`); a dim with such a symbol is sharded over
that axis. Q and K are sharded in whole heads; with more ranks than key-value heads, heads are
replicated. A dim that is a sum ("F+F") is sharded term by term, so a rank has gate rows and the
matching up rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pentad.core.errors import Problem, UserError
from pentad.core.fit import expert_range
from pentad.weights.map import Condition, Entry, Sizes, always, size_of
from pentad.weights.regions import Box, Region, Shape, clip

RankCoords = Mapping[str, tuple[int, int]]
"""Axis -> (number of ranks, this rank); axes that are absent have one rank."""
CutPlan = Mapping[str, str]

UNITS = {
    "Q": "d",
    "K": "d",
    "2M": "2",
    "U": "u",
    "O": "o",
    "LK": "LK1",
    "LV": "LV1",
    "LH": "LH1",
}
"""Symbols that are split in whole units of another symbol."""
REPEATED = {"K"}
"""Symbols whose units are repeated if there are more ranks than units."""
KIND_OF_UNITS = {
    "Q": "query heads",
    "K": "key-value heads",
    "U": "query heads",
    "O": "query heads",
    "2M": "pairs of gate and up",
}


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, start + length) of the global dim; they start at `local` in the shard."""

    start: int
    length: int
    local: int


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's part of a tensor: its shape, and its elements as regions of the sources."""

    shape: Shape
    boxes: tuple[tuple[Box, Shape], ...]
    """(box of the global tensor, its start in the local one)."""
    regions: tuple[Region, ...]


def cut_range(size: int, num: int, rank: int) -> tuple[int, int]:
    """The (start, stop) of a rank's shard of `size` rows, with the sizes of torch.chunk."""
    step = -(-size // num)
    return min(rank * step, size), min((rank + 1) * step, size)


def cut_symbol(symbol: str, axis: str, num: int, rank: int, sizes: Sizes) -> tuple[int, int]:
    """The (start, stop) of a rank's rows of a size symbol."""
    if axis == "ep":
        return expert_range(size_of(symbol, sizes), num, rank)
    if symbol not in UNITS:
        return cut_range(size_of(symbol, sizes), num, rank)
    unit = sizes[UNITS[symbol]]
    num_units = sizes[symbol] // unit
    if num_units % num == 0:
        start, stop = cut_range(num_units, num, rank)
    elif symbol in REPEATED and num % num_units == 0:
        start = rank * num_units // num
        stop = start + 1
    else:
        what = KIND_OF_UNITS.get(symbol, "key heads of delta nets")
        fits = [n for n in range(1, num_units + 1) if num_units % n == 0]
        remedy = f"use one of {', '.join(map(str, fits))}"
        raise UserError(Problem(f"{axis} = {num}", f"cannot split {num_units} {what}", remedy))
    return start * unit, stop * unit


def cut_dim(token: str, plan: CutPlan, coords: RankCoords, sizes: Sizes) -> list[Segment]:
    """The segments of one dim that a rank holds, in local order."""
    out: list[Segment] = []
    offset = local = 0
    for term in token.split("+"):
        size = size_of(term, sizes)
        axis = plan.get(term, "")
        start, stop = 0, size
        if axis in coords:
            start, stop = cut_symbol(term, axis, *coords[axis], sizes)
        if stop > start:
            out.append(Segment(offset + start, stop - start, local))
        offset += size
        local += stop - start
    return out


def cut_entry(entry: Entry, plan: CutPlan, coords: RankCoords) -> Local:
    """One rank's shard of a tensor under the plan."""
    dims = [cut_dim(token, plan, coords, entry.sizes) for token in entry.rule.shape.split()]
    shape = tuple(sum(segment.length for segment in dim) for dim in dims)
    boxes, regions = [], []
    for segments in itertools.product(*dims):
        box = tuple((s.start, s.start + s.length) for s in segments)
        origin = tuple(s.local for s in segments)
        boxes.append((box, origin))
        regions += [part.moved(origin) for r in entry.regions if (part := clip(r, box))]
    return Local(shape, tuple(boxes), tuple(regions))


def split_dims(entry: Entry, plan: CutPlan) -> dict[str, int]:
    """Maps axes to the tensor dims they shard, in entries without sums: {"ep": 0, "etp": 2}."""
    symbols = entry.rule.shape.split()
    return {plan[symbol]: dim for dim, symbol in enumerate(symbols) if symbol in plan}


@dataclass(frozen=True, slots=True)
class Seam:
    """A module boundary where tensor-parallel ranks communicate, as declared by the model file.

    Between layers tokens are split over the ranks (sequence parallelism), while projections are
    split by heads or columns and need all tokens: a seam gathers or scatters the tokens. Example:
    Seam("layers.{i}.attn", "gather"), {i} counts layers.
    """

    module: str
    kind: Literal["lookup", "gather", "norm", "scatter"]
    """lookup: a table split by rows; the ranks' results are summed and split by tokens.
    gather: the module needs all tokens; its first argument is gathered from the ranks.
    norm: its width is split; the mean of squares is computed over the parts of all ranks.
    scatter: its product is part of a sum, which is split by tokens; a bias is added afterwards."""
    when: Condition = always
