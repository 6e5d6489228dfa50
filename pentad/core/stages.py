"""Pipeline stages: how many a schedule wants, which layers each holds, which rank holds it.

Schedules are those of torch.distributed.pipelining, by class name without "Schedule".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from math import inf
from operator import add

from pentad.core.dims import ModelDims

SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def splits_backward(schedule: str) -> bool:
    """Zero-bubble schedules run backward in two parts: input gradients first, weights later."""
    return schedule.endswith("ZeroBubble")


def is_interleaved(schedule: str) -> bool:
    return schedule.startswith("Interleaved")


def default_stages_per_rank(schedule: str) -> int:
    return 1 if schedule == "1F1B" else 2


def takes_stages_per_rank(schedule: str, stages_per_rank: int) -> bool:
    if schedule == "1F1B":
        return stages_per_rank == 1
    return stages_per_rank == 2 if schedule == "ZBVZeroBubble" else stages_per_rank >= 2


def takes_microbatches(schedule: str, pp: int, num_microbatches: int) -> bool:
    """Interleaved schedules run in rounds of equal size, at least pp microbatches each."""
    rounds = max(1, num_microbatches // pp)
    return not is_interleaved(schedule) or num_microbatches % rounds == 0


def stages_of_rank(schedule: str, pp: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
    """Stage numbers a pipeline rank holds: looped, or both arms of a V under ZBV."""
    if schedule == "ZBVZeroBubble":
        return (rank, 2 * pp - 1 - rank)
    return tuple(rank + turn * pp for turn in range(stages_per_rank))


def split_layers(dims: ModelDims, num_stages: int) -> list[range]:
    """The layers of each stage: contiguous, at least one each, the costliest stage cheapest.

    Cost is matrix work a token, with the head counted in the last stage (the lookup of the
    first costs nothing). Among equal maxima the stages are as even as can be.
    """
    assert 1 <= num_stages <= dims.num_layers, f"{num_stages} stages of {dims.num_layers} layers"
    costs = [dims.layer_parts(i).active for i in range(dims.num_layers)]
    cuts = _even_cuts(tuple(costs), dims.embedding_params, num_stages)
    return [range(start, end) for start, end in zip((0, *cuts), (*cuts, len(costs)), strict=True)]


@cache
def _even_cuts(costs: tuple[int, ...], last_extra: int, num_stages: int) -> tuple[int, ...]:
    """The cuts with the least largest stage and, among those, the least sum of squares."""
    before = (0, *accumulate(costs))

    def cost(start: int, end: int) -> int:
        return before[end] - before[start] + (last_extra if end == len(costs) else 0)

    cap, _ = _best_cuts(len(costs), num_stages, cost, max)
    _, cuts = _best_cuts(
        len(costs), num_stages, lambda a, b: cost(a, b) ** 2 if cost(a, b) <= cap else inf, add
    )
    return cuts


def _best_cuts(
    size: int,
    num_stages: int,
    cost: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """(value, cuts) of the split of range(size) whose joined stage costs are least."""
    # best[i] is the least value of putting items i.. into the stages seen so far, last first.
    best = [cost(i, size) for i in range(size)] + [inf]
    picks: list[list[int]] = []
    for left in range(2, num_stages + 1):
        pick = [0] * size
        now = [inf] * (size + 1)
        for i in range(size - left + 1):
            for cut in range(i + 1, size - left + 2):
                value = join(cost(i, cut), best[cut])
                # On a tie the later cut wins: early stages take the odd layer.
                if value <= now[i]:
                    now[i], pick[i] = value, cut
        best = now
        picks.append(pick)
    cuts = [0]
    for pick in reversed(picks):
        cuts.append(pick[cuts[-1]])
    return best[0], tuple(cuts[1:])


def peak_in_flight(
    schedule: str, pp: int, stages_per_rank: int, num_microbatches: int, rank: int
) -> int:
    """Most (stage, microbatch) activation sets a pipeline rank holds at one time.

    A set lives from its forward to the end of its backward; under a zero-bubble schedule to the
    end of the weight part, since the graph is retained until then.
    """
    if pp == 1:
        return 1
    total = num_microbatches * stages_per_rank
    if schedule == "1F1B":
        return min(total, pp - rank)
    if schedule == "ZBVZeroBubble":
        return min(total, 2 * pp, num_microbatches + rank + 1)
    rounds = max(1, num_microbatches // pp)
    warmup = (stages_per_rank - 1) * (num_microbatches // rounds)
    if schedule == "Interleaved1F1B":
        return min(total, warmup + 2 * (pp - 1 - rank) + 1)
    return min(total, warmup + pp)
