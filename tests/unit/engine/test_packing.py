"""Microbatches: every row once, within the budget, balanced, the same count on every rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.core.dims import ModelDims
from pentad.engine.packing import plan_microbatches, sequence_cost


def quadratic(length: int) -> float:
    return 100.0 * length + length * length


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 120), max_size=60),
    st.one_of(st.none(), st.integers(1, 200)),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_the_plan_keeps_its_promises(lengths, max_tokens, num_ranks, min_per_rank):
    plan = plan_microbatches(
        lengths,
        quadratic,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        min_per_rank=min_per_rank,
    )
    dealt = [row for rank in plan for rows in rank for row in rows]
    assert sorted(dealt) == list(range(len(lengths)))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= min_per_rank
    bins = [rows for rank in plan for rows in rank]
    for rows in bins:
        tokens = sum(lengths[row] for row in rows)
        assert max_tokens is None or tokens <= max_tokens or len(rows) == 1
        assert rows == sorted(rows)
    if len(lengths) >= len(bins):
        assert all(bins)
    for rank in plan:
        loads = [sum(quadratic(lengths[row]) for row in rows) for rows in rank]
        assert loads == sorted(loads, reverse=True)
    again = plan_microbatches(
        list(lengths),
        quadratic,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        min_per_rank=min_per_rank,
    )
    assert plan == again


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 120), max_size=60),
    st.one_of(st.none(), st.integers(1, 200)),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_unbalanced_rows_stay_in_their_order(lengths, max_tokens, num_ranks, min_per_rank):
    plan = plan_microbatches(
        lengths,
        quadratic,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        min_per_rank=min_per_rank,
        by_cost=False,
    )
    assert [row for rank in plan for rows in rank for row in rows] == list(range(len(lengths)))
    sizes = [sum(map(len, rank)) for rank in plan]
    assert len(plan) == num_ranks and max(sizes) - min(sizes) <= 1
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= min_per_rank
    for rows in (rows for rank in plan for rows in rank):
        tokens = sum(lengths[row] for row in rows)
        assert max_tokens is None or tokens <= max_tokens or len(rows) == 1


def test_a_row_longer_than_the_budget_stands_alone():
    (plan,) = plan_microbatches([5, 50, 5, 3], quadratic, max_tokens=10)
    assert [1] in plan
    assert sorted(map(len, plan)) == [1, 1, 2]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=30, max_size=80))
def test_ranks_are_balanced_by_cost_not_by_count(lengths):
    """Longest-first greedy: two ranks differ by at most the costliest row."""
    plan = plan_microbatches(lengths, quadratic, num_ranks=2)
    loads = [sum(quadratic(lengths[row]) for rows in rank for row in rows) for rank in plan]
    assert abs(loads[0] - loads[1]) <= quadratic(max(lengths))


def test_one_long_row_weighs_as_much_as_many_short_ones():
    # 1 x 1000 costs 1.1e6; 100 x 10 cost 1.1e5: token balance would pair them up.
    lengths = [1000, *[10] * 100]
    plan = plan_microbatches(lengths, quadratic, num_ranks=2)
    assert plan[0] == [[0]]
    assert plan[1] == [list(range(1, 101))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(100, 300))
def test_few_microbatches(lengths, max_tokens):
    """At most half of the room of all but one microbatch is wasted (two half-empty ones merge)."""
    (plan,) = plan_microbatches(lengths, quadratic, max_tokens=max_tokens)
    assert len(plan) <= 2 * -(-sum(lengths) // max_tokens)


@pytest.mark.parametrize("window", [None, 16])
def test_the_cost_is_the_flops_of_the_model(window):
    dims = ModelDims(
        family="qwen3",
        vocab_size=50,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        sliding_window=window,
        sliding_layers=(True, False, True) if window else (),
    )
    cost = sequence_cost(dims)
    for length in (1, 7, 100):
        assert cost(length) == pytest.approx(dims.train_flops(length))
