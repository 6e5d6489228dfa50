"""How rows become microbatches: pure functions of their lengths.

A microbatch is bounded in tokens (memory) and balanced in cost (time), which differ: attention
grows with the square of a length. All ranks compute the same plan from the same lengths, so
nothing is exchanged.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from pentad.core.dims import ModelDims
from pentad.engine.section import EngineSettings

MicrobatchPlan = list[list[list[int]]]
"""plan[rank][microbatch] = row indices, ascending. Every rank has as many microbatches."""


def sequence_cost(dims: ModelDims) -> Callable[[int], float]:
    """FLOPs of one sequence by its length: what a microbatch is balanced by."""
    linear = 6.0 * dims.num_matmul_params
    if dims.sliding_layers:
        return lambda length: dims.train_flops(length)
    square = 6.0 * dims.q_dim * dims.num_layers
    return lambda length: length * (linear + square * (length + 1))


def plan_call(
    lengths: Sequence[int],
    cost: Callable[[int], float],
    settings: EngineSettings,
    num_ranks: int,
    take: Callable[[int], int] | None,
) -> MicrobatchPlan:
    """What each data-parallel rank computes of a call's rows. `take` rounds a number of
    microbatches up to one that a pipeline's schedule runs; without one, those that would be empty
    on all ranks are left out."""
    num, spec = settings.model.mb_spec.fewest, settings.model.mb_spec
    while True:
        plan = plan_microbatches(
            lengths,
            cost,
            max_tokens=spec.max_tokens_per_mb,
            num_ranks=num_ranks,
            min_per_rank=take(num) if take else num,
            by_cost=settings.balance_data,
        )
        num = len(plan[0])
        if take is None:
            used = [n for n, turn in enumerate(zip(*plan, strict=True)) if any(turn)]
            return [[microbatches[n] for n in used] for microbatches in plan]
        if take(num) == num:
            return plan


def plan_microbatches(
    lengths: Sequence[int],
    cost: Callable[[int], float],
    *,
    max_tokens: int | None = None,
    num_ranks: int = 1,
    min_per_rank: int = 1,
    by_cost: bool = True,
) -> MicrobatchPlan:
    """Deals rows to ranks and microbatches, by cost or in their order (`_in_order`).

    No microbatch exceeds `max_tokens`, except one that holds a single longer row. There are as
    few microbatches as that allows (more, if `min_per_rank` says so), the same number on each
    rank. Empty ones appear only where there are fewer rows than microbatches; each rank's
    microbatches run from costly to cheap, so ranks meet similar ones at the same time.
    """
    assert num_ranks > 0 and min_per_rank > 0 and all(n > 0 for n in lengths)
    budget = max_tokens or max(sum(lengths), 1)
    if not by_cost:
        return _in_order(lengths, budget, num_ranks, min_per_rank)
    costs = {n: cost(n) for n in set(lengths)}
    # Longest first, ties by index: the order is a function of the lengths alone.
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_oversized = sum(n > budget for n in lengths)
    rest = sum(n for n in lengths if n <= budget)
    num_bins = max(num_oversized + -(-rest // budget), num_ranks * min_per_rank)
    while True:
        num_bins = -(-num_bins // num_ranks) * num_ranks
        bins = _fill(order, lengths, costs, num_bins, budget)
        if bins is not None:
            return _deal(bins, lengths, costs, num_ranks)
        num_bins += num_ranks


def _in_order(
    lengths: Sequence[int], budget: int, num_ranks: int, min_per_rank: int
) -> MicrobatchPlan:
    """Each rank an equal number of rows that follow each other, cut where the budget ends; ranks
    that need fewer microbatches than others have empty ones at the end."""
    plan: MicrobatchPlan = []
    for rows in _parts(range(len(lengths)), num_ranks):
        cut: list[list[int]] = []
        for part in _parts(rows, min_per_rank):
            cut.append([])
            room = budget
            for row in part:
                if cut[-1] and lengths[row] > room:
                    cut.append([])
                    room = budget
                cut[-1].append(row)
                room -= lengths[row]
        plan.append(cut)
    most = max(map(len, plan))
    return [cut + [[] for _ in range(most - len(cut))] for cut in plan]


def _parts(rows: range, num: int) -> list[range]:
    bounds = [part * len(rows) // num for part in range(num + 1)]
    return [rows[begin:end] for begin, end in itertools.pairwise(bounds)]


def _fill(
    order: Sequence[int],
    lengths: Sequence[int],
    costs: dict[int, float],
    num_bins: int,
    budget: int,
) -> list[list[int]] | None:
    """Each row, longest first, into the cheapest bin with room; None when one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [budget] * num_bins
    heap = [(0.0, i) for i in range(num_bins)]
    for row in order:
        length = lengths[row]
        passed: list[tuple[float, int]] = []
        # An empty bin takes any row, however long.
        while heap and bins[heap[0][1]] and room[heap[0][1]] < length:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        load, index = heap[0]
        bins[index].append(row)
        room[index] -= length
        heapq.heapreplace(heap, (load + costs[length], index))
        for item in passed:
            heapq.heappush(heap, item)
    return bins


def _deal(
    bins: list[list[int]], lengths: Sequence[int], costs: dict[int, float], num_ranks: int
) -> MicrobatchPlan:
    """Bins by falling cost, dealt in turns back and forth, so that ranks' sums stay close."""
    load = [sum(costs[lengths[row]] for row in rows) for rows in bins]
    ranked = sorted(range(len(bins)), key=lambda i: (-load[i], i))
    plan: MicrobatchPlan = [[] for _ in range(num_ranks)]
    for turn in range(0, len(ranked), num_ranks):
        round_ = ranked[turn : turn + num_ranks]
        if (turn // num_ranks) % 2:
            round_.reverse()
        for rank, index in enumerate(round_):
            plan[rank].append(sorted(bins[index]))
    return plan
