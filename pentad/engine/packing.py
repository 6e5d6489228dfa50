"""Packs rows into microbatches: pure functions of the rows.

A microbatch is limited in tokens (memory) and balanced in cost (time), which differ: the cost of
attention is quadratic in the length. Rows of a group with a common prefix stay together if
possible, as a bundle: common tokens are computed once (`ops.tree`). All ranks compute the same plan
from the same rows, so nothing is exchanged.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pentad.core.dims import ModelDims
from pentad.core.flat_rows import FlatRows, lengths_of
from pentad.core.types import Row
from pentad.engine.section import EngineSettings

MicrobatchPlan = list[list[list[int]]]
"""plan[rank][microbatch] = row indices, ascending. All ranks have the same number of
microbatches."""
MIN_SHARED = 64
"""Minimum length of a shared prefix: on an H200 a step of SmolLM2-135M whose rows share 27 of 58
tokens takes longer as trees."""
MIN_SAVED = 0.1
"""Minimum share of a call's tokens that bundles must save."""
PIECES_PER_BIN = 4
"""Number of pieces per microbatch and rank into which bundles are cut if there are several
microbatches; with fewer, microbatches could not be balanced."""


@dataclass(frozen=True, slots=True)
class RowBundle:
    """Rows whose first `shared` tokens are computed once; 0 for a single row."""

    rows: tuple[int, ...]
    shared: int = 0

    def num_tokens(self, lengths: Sequence[int]) -> int:
        if len(self.rows) == 1:
            return lengths[self.rows[0]]
        return sum(lengths[row] for row in self.rows) - self.num_saved

    def cost(self, lengths: Sequence[int], cost: Callable[[int], float]) -> float:
        if len(self.rows) == 1:
            return cost(lengths[self.rows[0]])
        saved = cost(self.shared) * (len(self.rows) - 1) if self.shared else 0.0
        return sum(cost(lengths[row]) for row in self.rows) - saved

    @property
    def num_saved(self) -> int:
        return self.shared * (len(self.rows) - 1)

    def cut(self, num: int) -> list[RowBundle]:
        """Splits a bundle into `num` pieces with about the same number of rows."""
        parts = _parts(range(len(self.rows)), min(num, len(self.rows)))
        return [RowBundle(tuple(self.rows[i] for i in part), self.shared) for part in parts]


def find_bundles(rows: Sequence[Row]) -> list[RowBundle]:
    """Bundles the rows of a group by common prefixes; rows stay single if that saves little."""
    of_group: dict[int, list[int]] = {}
    for i, group in enumerate(_groups_of(rows)):
        if group is not None:
            of_group.setdefault(group, []).append(i)
    bundles, bundled = [], set()
    lengths = lengths_of(rows)
    for indices in of_group.values():
        if len(indices) == 1 or min(lengths[i] for i in indices) <= MIN_SHARED:
            continue
        ids = [rows[i].ids.numpy() for i in indices]
        shared = num_common(ids) - 1
        if shared >= MIN_SHARED:
            bundles.append(RowBundle(tuple(indices), shared))
            bundled.update(indices)
    saved = sum(bundle.num_saved for bundle in bundles)
    if not saved or saved < MIN_SAVED * sum(lengths):
        return [RowBundle((i,)) for i in range(len(rows))]
    bundles += [RowBundle((i,)) for i in range(len(rows)) if i not in bundled]
    return sorted(bundles, key=lambda bundle: bundle.rows)


def _groups_of(rows: Sequence[Row]) -> Sequence[int | None]:
    """The group of each row; None for rows that are computed alone."""
    if isinstance(rows, FlatRows):
        return rows.groups
    return [row.group if row.routes is None else None for row in rows]


def left_out(bundles: Sequence[RowBundle] | None, plan: MicrobatchPlan) -> list[int]:
    """Number of leading tokens of each row that another row of its microbatch computes."""
    shared = {row: bundle for bundle in bundles or () if bundle.shared for row in bundle.rows}
    lengths = []
    for mb in itertools.chain.from_iterable(plan):
        together = Counter(shared[row] for row in mb if row in shared)
        lengths += [bundle.shared for bundle, num in together.items() for _ in range(num - 1)]
    return lengths


def num_common(ids: Sequence[np.ndarray]) -> int:
    """Returns the length of the common prefix of all sequences."""
    num = min(map(len, ids))
    for other in ids[1:]:
        differs = ids[0][:num] != other[:num]
        first = int(differs.argmax()) if num else 0
        num = first if num and differs[first] else num
    return num


def sequence_cost(dims: ModelDims) -> Callable[[int], float]:
    """Returns a function of a sequence's FLOPs by length, used to balance microbatches."""
    linear = 6.0 * dims.num_matmul_params
    if dims.sliding_layers or dims.linear_layers or dims.own:
        return lambda length: linear * length + dims.attention_flops(length)
    square = 6.0 * dims.q_dim * dims.num_layers
    return lambda length: length * (linear + square * (length + 1))


def plan_call(
    lengths: Sequence[int],
    cost: Callable[[int], float],
    settings: EngineSettings,
    num_ranks: int,
    take: Callable[[int], int] | None,
    bundles: Sequence[RowBundle] | None = None,
    *,
    is_alone: bool = False,
) -> MicrobatchPlan:
    """Plans the rows of each data-parallel rank in a call. `take`: rounds the number of
    microbatches up to one that a pipeline's schedule supports; without it, microbatches that would
    be empty on all ranks are omitted. `is_alone`: every row has a microbatch of its own."""
    num, spec = settings.model.mb_spec.fewest, settings.model.mb_spec
    while True:
        plan = plan_microbatches(
            lengths,
            cost,
            max_tokens=1 if is_alone else spec.max_tokens_per_mb,
            num_ranks=num_ranks,
            min_per_rank=take(num) if take else num,
            by_cost=settings.balance_data,
            bundles=bundles,
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
    bundles: Sequence[RowBundle] | None = None,
) -> MicrobatchPlan:
    """Distributes rows over ranks and microbatches, by cost or in their order (`_in_order`).

    No microbatch exceeds `max_tokens`, except one that holds a single longer row. There are as few
    microbatches as possible, but at least `min_per_rank`, the same number on each rank. Empty ones
    appear only if there are fewer rows than microbatches; each rank's microbatches run from costly
    to cheap, so that ranks compute similar ones at the same time. Rows of a bundle stay together as
    far as that allows.
    """
    assert num_ranks > 0 and min_per_rank > 0 and all(n > 0 for n in lengths)
    budget = max_tokens or max(sum(lengths), 1)
    bundles = bundles or [RowBundle((row,)) for row in range(len(lengths))]
    pieces = cut_bundles(bundles, lengths, budget, num_ranks * min_per_rank)
    sizes = [piece.num_tokens(lengths) for piece in pieces]
    if by_cost:
        costs = [piece.cost(lengths, cost) for piece in pieces]
        plan = _by_cost(sizes, costs, budget, num_ranks, min_per_rank)
    else:
        plan = _in_order(sizes, budget, num_ranks, min_per_rank)
    return [
        [sorted(row for piece in mb for row in pieces[piece].rows) for mb in mbs] for mbs in plan
    ]


def cut_bundles(
    bundles: Sequence[RowBundle], lengths: Sequence[int], budget: int, num_bins: int
) -> list[RowBundle]:
    """Cuts bundles that exceed a microbatch; cuts all bundles if there are several microbatches and
    too few bundles to balance them."""
    pieces: list[RowBundle] = []
    for bundle in bundles:
        if bundle.num_tokens(lengths) <= budget:
            pieces.append(bundle)
            continue
        rows: list[int] = []
        for row in bundle.rows:
            if rows and RowBundle((*rows, row), bundle.shared).num_tokens(lengths) > budget:
                pieces.append(RowBundle(tuple(rows), bundle.shared))
                rows = []
            rows.append(row)
        pieces.append(RowBundle(tuple(rows), bundle.shared))
    fewest = PIECES_PER_BIN * num_bins if num_bins > 1 else 1
    if len(pieces) >= fewest:
        return pieces
    each = -(-fewest // max(len(pieces), 1))
    return [part for piece in pieces for part in piece.cut(each)]


def _by_cost(
    sizes: Sequence[int], costs: Sequence[float], budget: int, num_ranks: int, min_per_rank: int
) -> MicrobatchPlan:
    # Longest first, ties by index: the order depends on the lengths alone.
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    num_oversized = sum(n > budget for n in sizes)
    rest = sum(n for n in sizes if n <= budget)
    num_bins = max(num_oversized + -(-rest // budget), num_ranks * min_per_rank)
    while True:
        num_bins = -(-num_bins // num_ranks) * num_ranks
        bins = _fill(order, sizes, costs, num_bins, budget)
        if bins is not None:
            return _deal(bins, costs, num_ranks)
        num_bins += num_ranks


def _in_order(
    lengths: Sequence[int], budget: int, num_ranks: int, min_per_rank: int
) -> MicrobatchPlan:
    """Gives each rank the same number of consecutive rows, split at the token budget; ranks that
    need fewer microbatches than others get empty ones at the end."""
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
    costs: Sequence[float],
    num_bins: int,
    budget: int,
) -> list[list[int]] | None:
    """Puts each row, longest first, into the cheapest bin with space; None if a row fits no bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [budget] * num_bins
    heap = [(0.0, i) for i in range(num_bins)]
    for row in order:
        length = lengths[row]
        passed: list[tuple[float, int]] = []
        # An empty bin takes a row of any length.
        while heap and bins[heap[0][1]] and room[heap[0][1]] < length:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        load, index = heap[0]
        bins[index].append(row)
        room[index] -= length
        heapq.heapreplace(heap, (load + costs[row], index))
        for item in passed:
            heapq.heappush(heap, item)
    return bins


def _deal(bins: list[list[int]], costs: Sequence[float], num_ranks: int) -> MicrobatchPlan:
    """Distributes bins of decreasing cost to ranks in alternating order, to balance the ranks'
    sums."""
    load = [sum(costs[row] for row in rows) for rows in bins]
    ranked = sorted(range(len(bins)), key=lambda i: (-load[i], i))
    plan: MicrobatchPlan = [[] for _ in range(num_ranks)]
    for turn in range(0, len(ranked), num_ranks):
        round_ = ranked[turn : turn + num_ranks]
        if (turn // num_ranks) % 2:
            round_.reverse()
        for rank, index in enumerate(round_):
            plan[rank].append(sorted(bins[index]))
    return plan
