"""Pairs on their way to experts and back: none is lost, what it took is measured."""

from collections import Counter

import pytest

from pentad.core.fit import expert_range
from pentad.core.layout import Layout

pytestmark = pytest.mark.dist

NUM_EXPERTS, CHOSEN, HIDDEN = 8, 3, 24


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(dp_shard=4, ep=4), Layout(dp_shard=4, ep=2, etp=2), Layout(dp_shard=4, ep=2)),
        Layout(dp_shard=3, ep=3),  # 3, 3 and 2 experts
        Layout(dp_shard=5, ep=5),  # 2, 2, 2, 1 and 1
    ],
    ids=str,
)
def test_token_conservation(pool, layout):
    """Every chosen pair arrives at its expert, once on each rank that cuts it, and comes back."""
    found = pool.run(layout.world, "exchange_cases", "conserve", layout=layout)
    group_size = layout.ep * layout.etp
    for start in range(0, layout.world, group_size):
        ranks = found[start : start + group_size]
        chosen = Counter(expert for ids, _, _ in ranks for expert in ids)
        for place, (_, arrived, off) in enumerate(ranks):
            mine = range(*expert_range(NUM_EXPERTS, layout.ep, place // layout.etp))
            assert mine and arrived == [chosen[n] for n in mine]
            assert off < 1e-12, "a result came back to another token, or not at all"
        total = sum(sum(arrived) for _, arrived, _ in ranks)
        assert total == sum(len(ids) for ids, _, _ in ranks) * layout.etp


def test_what_the_exchange_moved_and_took_is_measured(pool):
    """Bytes against a count of the routed ids, at the router, on every rank; what one of two ranks
    sends back is what the other sent it, without the weights."""
    ranks = pool.run(2, "exchange_cases", "measured_step", layout=Layout(dp_shard=2, ep=2))
    for (found, seconds, num_pairs, kept, num_passes, computed), other in (ranks, ranks[::-1]):
        assert computed == num_pairs + other[2], "pairs of both ranks, counted at the experts"
        leaving = num_pairs - kept
        assert leaving > 0 < kept
        assert found["dispatch"] == [leaving * (HIDDEN * 4 + 4), num_passes], "a row and its weight"
        num_tokens = num_pairs // 2
        assert found["route"] == [num_tokens * (NUM_EXPERTS * 4 + 2 * (4 + 8)), num_passes]
        coming = other[2] - other[3]
        assert found["combine"] == [coming * HIDDEN * 4, num_passes]
        assert all(0 < seconds[name] < 60 for name in ("route", "dispatch", "combine"))


def test_the_shared_expert_is_computed_while_pairs_travel_both_ways(pool):
    """In the order in which a GPU is given its work: counts, rows and weights out, results back."""
    done = pool.run(2, "exchange_cases", "order_of_work", layout=Layout(tp=2, ep=2))
    assert done == ["exchange", "up", "exchange", "exchange", "experts", "exchange", "down"]
