"""Resharding plans executed on real arrays give exactly the target layout."""

import itertools
import random

import pytest
import torch

from pentad.core.errors import UserError
from pentad.weights.regions import box_shape, full_box
from pentad.weights.reshard import plan_moves


def slices(box):
    return tuple(slice(start, stop) for start, stop in box)


def random_tiling(rng, box):
    shape = box_shape(box)
    dim = rng.randrange(len(shape))
    if shape[dim] < 2 or rng.random() < 0.4:
        return [box]
    at = box[dim][0] + rng.randint(1, shape[dim] - 1)
    low, high = list(box), list(box)
    low[dim], high[dim] = (box[dim][0], at), (at, box[dim][1])
    return random_tiling(rng, tuple(low)) + random_tiling(rng, tuple(high))


def random_layout(rng, shapes):
    """Each tensor cut into boxes, each box on one or more ranks, each rank with one box."""
    out = []
    for name, shape in shapes.items():
        boxes = random_tiling(rng, full_box(shape))
        ranks = list(range(len(boxes) + rng.randrange(4)))
        rng.shuffle(ranks)
        out += [(rank, name, boxes[n % len(boxes)]) for n, rank in enumerate(ranks)]
    return out


def shards_of(layout, tensors):
    return {(r, n, box): tensors[n][slices(box)].clone() for r, n, box in layout}


def test_random_layouts_give_each_target_its_elements_exactly_once():
    rng = random.Random(5)
    shapes = {"a": (7,), "b": (5, 6), "c": (3, 4, 5)}
    tensors = {
        n: torch.rand(s, generator=torch.Generator().manual_seed(1)) for n, s in shapes.items()
    }
    for _ in range(150):
        run(random_layout(rng, shapes), random_layout(rng, shapes), shapes, tensors)


def run(source, target, shapes, tensors):
    sent = {(r, n): t for (r, n, _), t in shards_of(source, tensors).items()}
    expected = shards_of(target, tensors)
    got = {(r, n): torch.full(t.shape, float("nan")) for (r, n, _), t in expected.items()}
    written = {key: torch.zeros(t.shape, dtype=torch.int) for key, t in got.items()}
    for move in plan_moves(shapes, source, target):
        block = sent[move.source_rank, move.name][slices(move.source_box)]
        got[move.target_rank, move.name][slices(move.target_box)] = block
        written[move.target_rank, move.name][slices(move.target_box)] += 1
    for (rank, name, _), tensor in expected.items():
        assert torch.equal(got[rank, name], tensor)
        assert (written[rank, name] == 1).all()


def grid(shape, cuts, num_replicas=1):
    """Rank layout of a tensor cut evenly along its dims, replicas outermost."""
    boxes = itertools.product(
        *[
            [(size * i // n, size * (i + 1) // n) for i in range(n)]
            for size, n in zip(shape, cuts, strict=True)
        ]
    )
    boxes = list(boxes)
    return [
        (replica * len(boxes) + rank, "w", box)
        for replica in range(num_replicas)
        for rank, box in enumerate(boxes)
    ]


@pytest.mark.parametrize("source", [(1, 1), (2, 1), (1, 3), (4, 2), (5, 7)])
@pytest.mark.parametrize("target", [(1, 1), (3, 1), (1, 2), (2, 4), (7, 5)])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_every_pair_of_grids(source, target, num_replicas):
    shapes = {"w": (35, 29)}
    tensors = {"w": torch.arange(35.0 * 29).view(35, 29)}
    run(grid((35, 29), source, num_replicas), grid((35, 29), target), shapes, tensors)


def test_what_a_rank_has_itself_does_not_travel():
    layout = grid((8, 8), (4, 2))
    assert all(move.is_local for move in plan_moves({"w": (8, 8)}, layout, layout))


def test_replicas_share_the_sending():
    source = grid((8, 8), (2, 1), num_replicas=4)
    target = [(rank + 100, "w", box) for rank, _, box in grid((8, 8), (8, 1))]
    sent = {}
    for move in plan_moves({"w": (8, 8)}, source, target):
        sent[move.source_rank] = sent.get(move.source_rank, 0) + move.numel
    assert sent == {rank: 8 for rank in range(8)}


def test_the_plan_does_not_depend_on_the_order_it_is_asked_in():
    source, target = grid((8, 6), (4, 1), 2), grid((8, 6), (1, 3), 2)
    first = plan_moves({"w": (8, 6), "v": (2,)}, source, target)
    assert plan_moves({"v": (2,), "w": (8, 6)}, source[::-1], iter(target[::-1])) is first


def test_holes_and_unknown_tensors_are_told():
    layout = grid((8, 6), (4, 1))
    with pytest.raises(UserError, match="resharding: w: the source ranks do not hold it: 12 of 48"):
        plan_moves({"w": (8, 6)}, layout[1:], layout)
    with pytest.raises(UserError, match="resharding: w: rank 1 holds two blocks of it"):
        plan_moves({"w": (8, 6)}, [*layout, (1, "w", ((0, 2), (0, 6)))], layout)
    with pytest.raises(UserError, match="resharding: w: its global shape is not given"):
        plan_moves({"v": (8, 6)}, layout, layout)
