"""Regions map blocks of one tensor to blocks of another; this module has the algebra on them, and
the byte ranges of a block in a file.

A tensor of one name space (native, Megatron) is described as a list of regions of tensors of
another (HF-on-disk). Loading, saving, conversion, resharding and coverage are all clipping,
inverting and joining such lists. Independent of torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""One half-open range per dim."""


@dataclass(frozen=True, slots=True)
class DimRun:
    """A pair of source and target dims that advance together for `length` steps."""

    source_dim: int
    target_dim: int
    length: int


@dataclass(frozen=True, slots=True)
class Region:
    """A block of `source` that equals a block of the target that lists it.

    Dims without a run have extent 1 at their start. Example: up_proj [F, D] as plane 1 of a target
    [2, F, D] has source start (0, 0), target start (1, 0, 0), and the runs DimRun(0, 1, F) and
    DimRun(1, 2, D).
    """

    source: str
    source_shape: Shape
    source_start: Shape
    target_start: Shape
    runs: tuple[DimRun, ...]

    @property
    def numel(self) -> int:
        return math.prod(run.length for run in self.runs)

    @property
    def target_box(self) -> Box:
        return _box(self.target_start, {run.target_dim: run.length for run in self.runs})

    @property
    def source_box(self) -> Box:
        return _box(self.source_start, {run.source_dim: run.length for run in self.runs})

    @property
    def alone(self) -> Region:
        """The region relative to a tensor that contains only its source box."""
        return replace(self, source_start=(0,) * len(self.source_start))

    def moved(self, by: Shape) -> Region:
        """The region with its target start shifted by `by`."""
        start = tuple(a + b for a, b in zip(self.target_start, by, strict=True))
        return replace(self, target_start=start)


def whole_region(source: str, shape: Shape) -> Region:
    """The region that maps all of `source` to a target of the same shape."""
    zeros = (0,) * len(shape)
    return Region(
        source, shape, zeros, zeros, tuple(DimRun(dim, dim, size) for dim, size in enumerate(shape))
    )


def _box(start: Shape, lengths: Mapping[int, int]) -> Box:
    return tuple((s, s + lengths.get(dim, 1)) for dim, s in enumerate(start))


def full_box(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def within(box: Box, origin: Box) -> tuple[slice, ...]:
    """The box as slices of a tensor that covers the box `origin`."""
    pairs = zip(box, origin, strict=True)
    return tuple(slice(start - zero, stop - zero) for (start, stop), (zero, _) in pairs)


def intersect(a: Box, b: Box) -> Box | None:
    """Intersection of two boxes of one tensor; None if empty."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in both) else both


def clip(region: Region, box: Box) -> Region | None:
    """The part of the region inside a box of the target, relative to the box's origin."""
    inside = intersect(region.target_box, box)
    if inside is None:
        return None
    source_start = list(region.source_start)
    runs = []
    for run in region.runs:
        start, stop = inside[run.target_dim]
        source_start[run.source_dim] += start - region.target_start[run.target_dim]
        runs.append(DimRun(run.source_dim, run.target_dim, stop - start))
    target_start = tuple(
        start - origin for (start, _), (origin, _) in zip(inside, box, strict=True)
    )
    return Region(
        region.source, region.source_shape, tuple(source_start), target_start, tuple(runs)
    )


def clip_all(regions: Iterable[Region], box: Box) -> list[Region]:
    return [part for region in regions if (part := clip(region, box)) is not None]


def flip(region: Region, target: str, target_shape: Shape) -> Region:
    """The inverse region: source and target swapped."""
    runs = tuple(DimRun(run.target_dim, run.source_dim, run.length) for run in region.runs)
    return Region(target, target_shape, region.target_start, region.source_start, runs)


class Lookup:
    """Index of the regions of one tensor by the rows they fill.

    A stack of experts has hundreds of regions, and one expert needs two of them.
    """

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = sorted(regions, key=lambda region: region.target_start)
        self.starts = [region.target_start[:1] for region in self.regions]
        heights = [stop - start for r in self.regions for start, stop in r.target_box[:1]]
        self.tallest = max(heights, default=0)

    def near(self, box: Box) -> Sequence[Region]:
        """All regions that overlap the box, and possibly some others."""
        if not box:
            return self.regions
        start, stop = box[0]
        first = bisect_left(self.starts, (start - self.tallest + 1,))
        return self.regions[first : bisect_left(self.starts, (stop,))]


def join(outer: Sequence[Region], inner: Mapping[str, Lookup]) -> list[Region]:
    """Composes A <- B and B <- C to A <- C: replaces the sources of the outer regions by theirs."""
    out = []
    for region in outer:
        for part in inner[region.source].near(region.source_box):
            small = clip(part, region.source_box)
            if small is not None:
                out.append(_chain(region, small))
    return out


def _chain(outer: Region, inner: Region) -> Region:
    """Composes two regions; the starts of `inner` are relative to the outer region's source box."""
    target_start = list(outer.target_start)
    target_dim_of = {}
    for run in outer.runs:
        target_dim_of[run.source_dim] = run.target_dim
        target_start[run.target_dim] += inner.target_start[run.source_dim]
    runs = tuple(
        DimRun(run.source_dim, target_dim_of[run.target_dim], run.length)
        for run in inner.runs
        if run.target_dim in target_dim_of
    )
    return Region(inner.source, inner.source_shape, inner.source_start, tuple(target_start), runs)


def coverage_fault(boxes: Sequence[Box], shape: Shape, *, gaps: bool = False) -> str | None:
    """Why the boxes do not cover a tensor of that shape exactly once, or None if they do.

    With `gaps` elements may stay uncovered (padding), but none may be covered twice.
    """
    if len(boxes) == 1 and boxes[0] == full_box(shape):
        return None
    for box in boxes:
        if any(start < 0 or stop > size for (start, stop), size in zip(box, shape, strict=True)):
            return f"block {show(box)} is outside shape {list(shape)}"
    # A sweep along dim 0: only blocks that are active at the same time can overlap.
    active: list[Box] = []
    for box in sorted(boxes):
        active = [other for other in active if not other or other[0][1] > box[0][0]]
        for other in active:
            if intersect(other, box) is not None:
                return f"block {show(box)} is given twice (also by {show(other)})"
        active.append(box)
    covered = sum(math.prod(box_shape(box)) for box in boxes)
    if covered != math.prod(shape) and not gaps:
        return f"{math.prod(shape) - covered} of {math.prod(shape)} elements are not covered"
    return None


def show(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


CHUNK_BYTES = 8 << 20
"""Maximum number of bytes per write."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte ranges in a file: runs of `length` bytes, the first at `start`, the others at multiples
    of `steps`: (number, stride), outermost first."""

    start: int
    length: int
    steps: tuple[tuple[int, int], ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.length * math.prod(number for number, _ in self.steps)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """(offset in the file, start and stop in the block's bytes) of each contiguous write."""
        at = 0
        shifts = (range(0, number * distance, distance) for number, distance in self.steps)
        for found in product(*shifts):
            offset = self.start + sum(found)
            for start in range(0, self.length, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, self.length)
                yield offset + start, at + start, at + stop
            at += self.length


def runs_of(
    shape: Sequence[int], box: Sequence[tuple[int, int]], item_bytes: int, start: int
) -> Runs:
    """The byte ranges of a box in the file; the tensor's data begin at `start`."""
    steps: list[tuple[int, int]] = []
    length, row_bytes, is_one_run = item_bytes, item_bytes, True
    for size, (low, high) in reversed(list(zip(shape, box, strict=True))):
        start += low * row_bytes
        if is_one_run:
            length = (high - low) * row_bytes
            is_one_run = high - low == size
        elif high - low > 1:
            steps.append((high - low, row_bytes))
        row_bytes *= size
    return Runs(start, length, tuple(reversed(steps)))
