"""Region algebra against brute force: every element is followed by hand."""

import itertools
import random

import pytest

from pentad.weights.regions import (
    DimRun,
    Lookup,
    Region,
    box_shape,
    clip_all,
    coverage_fault,
    flip,
    full_box,
    intersect,
    join,
)


def elements(region):
    """{target index: source index} of one region."""
    out = {}
    for steps in itertools.product(*(range(run.length) for run in region.runs)):
        source, target = list(region.source_start), list(region.target_start)
        for run, step in zip(region.runs, steps, strict=True):
            source[run.source_dim] += step
            target[run.target_dim] += step
        out[tuple(target)] = (region.source, tuple(source))
    return out


def table(regions):
    out = {}
    for region in regions:
        for target, source in elements(region).items():
            assert target not in out
            out[target] = source
    return out


# target [2, 3, 4]: plane 0 is a [3, 4], plane 1 is the transpose of b [4, 3], cut in two
TARGET = (2, 3, 4)
REGIONS = [
    Region("a", (3, 4), (0, 0), (0, 0, 0), (DimRun(0, 1, 3), DimRun(1, 2, 4))),
    Region("b", (4, 3), (0, 0), (1, 0, 0), (DimRun(1, 1, 3), DimRun(0, 2, 1))),
    Region("b", (4, 3), (1, 0), (1, 0, 1), (DimRun(1, 1, 3), DimRun(0, 2, 3))),
]


def test_the_example_maps_every_element_where_it_says():
    found = table(REGIONS)
    assert len(found) == 24
    for x, y in itertools.product(range(3), range(4)):
        assert found[0, x, y] == ("a", (x, y))
        assert found[1, x, y] == ("b", (y, x))


def test_clipping_keeps_exactly_the_elements_in_the_box():
    whole = table(REGIONS)
    ranges = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in TARGET]
    for box in itertools.product(*ranges):
        expected = {
            tuple(i - start for i, (start, _) in zip(index, box, strict=True)): source
            for index, source in whole.items()
            if all(start <= i < stop for i, (start, stop) in zip(index, box, strict=True))
        }
        assert table(clip_all(REGIONS, box)) == expected


def test_flipping_twice_is_the_region_itself_and_once_is_its_inverse():
    for region in REGIONS:
        other = flip(region, "t", TARGET)
        assert flip(other, region.source, region.source_shape) == region
        inverse = {source: ("t", target) for target, (_, source) in elements(region).items()}
        assert elements(other) == inverse


def test_joining_follows_every_element_through_both_maps():
    # u [6, 4] <- planes of t; t <- a and b as above
    outer = [
        Region("t", TARGET, (0, 0, 0), (0, 0), (DimRun(1, 0, 3), DimRun(2, 1, 4))),
        Region("t", TARGET, (1, 0, 0), (3, 0), (DimRun(1, 0, 3), DimRun(2, 1, 4))),
    ]
    inner = table(REGIONS)
    expected = {index: inner[middle] for index, (_, middle) in table(outer).items()}
    assert table(join(outer, {"t": Lookup(REGIONS)})) == expected


def test_joining_partial_blocks():
    rng = random.Random(3)
    inner = table(REGIONS)
    for _ in range(200):
        start = [rng.randrange(n) for n in TARGET]
        length = [rng.randint(1, n - s) for n, s in zip(TARGET, start, strict=True)]
        order = rng.sample(range(3), 3)
        offset = tuple(rng.randrange(3) for _ in range(3))
        runs = tuple(DimRun(dim, order[dim], length[dim]) for dim in range(3))
        outer = [Region("t", TARGET, tuple(start), offset, runs)]
        expected = {index: inner[middle] for index, (_, middle) in table(outer).items()}
        assert table(join(outer, {"t": Lookup(REGIONS)})) == expected


def cells(box):
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


def test_coverage_fault_agrees_with_counting_cells():
    rng = random.Random(11)
    seen = {"once": 0, "twice": 0, "gap": 0}
    for _ in range(600):
        shape = (rng.randint(1, 4), rng.randint(1, 4))
        boxes = _random_tiling(rng, full_box(shape))
        if rng.random() < 0.5 and len(boxes) > 1:
            boxes[rng.randrange(len(boxes))] = boxes[rng.randrange(len(boxes))]
        counts = {cell: sum(cell in cells(box) for box in boxes) for cell in cells(full_box(shape))}
        fault = coverage_fault(boxes, shape)
        if max(counts.values()) > 1:
            seen["twice"] += 1
            assert fault is not None and "twice" in fault
        elif min(counts.values()) == 0:
            seen["gap"] += 1
            assert fault is not None and "not covered" in fault
        else:
            seen["once"] += 1
            assert fault is None
    assert min(seen["once"], seen["twice"]) > 100


def _random_tiling(rng, box):
    shape = box_shape(box)
    dim = rng.randrange(len(shape))
    if shape[dim] == 1 or rng.random() < 0.3:
        return [box]
    at = box[dim][0] + rng.randint(1, shape[dim] - 1)
    low, high = list(box), list(box)
    low[dim], high[dim] = (box[dim][0], at), (at, box[dim][1])
    return _random_tiling(rng, tuple(low)) + _random_tiling(rng, tuple(high))


def test_a_gap_is_a_fault_unless_gaps_are_allowed():
    boxes = [((0, 2), (0, 3))]
    assert coverage_fault(boxes, (4, 3)) == "6 of 12 elements are not covered"
    assert coverage_fault(boxes, (4, 3), gaps=True) is None
    assert "outside" in coverage_fault([((0, 5), (0, 3))], (4, 3), gaps=True)


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        (((0, 4),), ((2, 6),), ((2, 4),)),
        (((0, 2),), ((2, 6),), None),
        (((0, 4), (1, 2)), ((1, 9), (0, 5)), ((1, 4), (1, 2))),
    ],
)
def test_intersections(a, b, common):
    assert intersect(a, b) == common
    assert intersect(b, a) == common
