"""Stages: the split is the best there is, and in-flight counts are those of torch's schedules."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from pentad.core.dims import ModelDims
from pentad.core.fit import (
    SCHEDULES,
    default_stages_per_rank,
    peak_in_flight,
    split_layers,
    stages_of_rank,
    takes_microbatches,
    takes_stages_per_rank,
)

MULTI = [name for name in SCHEDULES if name != "1F1B"]


def torch_actions(name: str, pp: int, per_rank: int, num_microbatches: int, rank: int) -> list:
    """What torch's own schedule does on one rank, without processes or stages."""
    schedule = object.__new__(schedules.get_schedule_class(name))
    schedule.pp_group_size = pp
    schedule.n_local_stages = per_rank
    schedule.num_stages = pp * per_rank
    schedule._n_microbatches = num_microbatches
    schedule.number_of_rounds = max(1, num_microbatches // pp)
    schedule.microbatches_per_round = num_microbatches // schedule.number_of_rounds
    return [x for x in schedule._calculate_single_rank_operations(rank) if x is not None]


def torch_peak(*case) -> int:
    live = peak = 0
    for action in torch_actions(*case):
        if action.computation_type == schedules.FORWARD:
            live += 1
        elif action.computation_type in (schedules.FULL_BACKWARD, schedules.BACKWARD_WEIGHT):
            live -= 1
        peak = max(peak, live)
    assert live == 0
    return peak


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_activation_sets_in_flight_are_those_of_torch(name, pp):
    for per_rank in (2, 3, 4):
        if not takes_stages_per_rank(name, per_rank):
            continue
        for count in [m for m in range(1, 3 * pp + 2) if takes_microbatches(name, pp, m)]:
            for rank in range(pp):
                case = (name, pp, per_rank, count, rank)
                assert peak_in_flight(*case) == torch_peak(*case), case


def test_1f1b_holds_one_set_for_each_stage_after_it():
    # torch's Schedule1F1B does not build a list: its warm-up is num_stages - stage_index.
    assert [peak_in_flight("1F1B", 4, 1, 8, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [peak_in_flight("1F1B", 4, 1, 2, rank) for rank in range(4)] == [2, 2, 2, 1]
    assert peak_in_flight("Interleaved1F1B", 1, 1, 16, 0) == 1


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_stand_on_the_ranks_torch_expects(name, pp):
    style = "v" if name == "ZBVZeroBubble" else "loop"
    mapping = generate_stage_to_rank_mapping(pp, 2 * pp, style=style)
    for rank in range(pp):
        assert stages_of_rank(name, pp, 2, rank) == tuple(
            stage for stage, owner in sorted(mapping.items()) if owner == rank
        )
        used = {action.stage_index for action in torch_actions(name, pp, 2, 2 * pp, rank)}
        assert used == set(stages_of_rank(name, pp, 2, rank))


def test_stages_per_rank_of_each_schedule():
    allowed = {
        name: [n for n in range(1, 5) if takes_stages_per_rank(name, n)] for name in SCHEDULES
    }
    assert allowed == {
        "1F1B": [1],
        "Interleaved1F1B": [2, 3, 4],
        "InterleavedZeroBubble": [2, 3, 4],
        "ZBVZeroBubble": [2],
    }
    assert all(takes_stages_per_rank(name, default_stages_per_rank(name)) for name in SCHEDULES)


def model(num_layers: int, vocab: int, moe: tuple[bool, ...] = ()) -> ModelDims:
    return ModelDims(
        family="qwen3_moe",
        vocab_size=vocab,
        hidden_size=8,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=16,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=32,
        moe_layers=moe,
    )


def cost_of(dims: ModelDims, stages: list[range]) -> tuple[int, int]:
    costs = [sum(dims.layer_parts(i).active for i in layers) for layers in stages]
    costs[-1] += dims.embedding_params
    return max(costs), sum(cost * cost for cost in costs)


@given(st.data())
def test_no_other_split_is_better(data):
    num_layers = data.draw(st.integers(1, 8))
    moe = tuple(data.draw(st.lists(st.booleans(), min_size=num_layers, max_size=num_layers)))
    dims = model(num_layers, data.draw(st.sampled_from([1, 100, 1000])), moe)
    num_stages = data.draw(st.integers(1, num_layers))
    ours = split_layers(dims, num_stages)
    assert [i for layers in ours for i in layers] == list(range(num_layers))
    assert len(ours) == num_stages and all(layers for layers in ours)
    others = [
        [range(a, b) for a, b in zip((0, *cuts), (*cuts, num_layers), strict=True)]
        for cuts in combinations(range(1, num_layers), num_stages - 1)
    ]
    assert cost_of(dims, ours) == min(cost_of(dims, other) for other in others)


def test_the_head_takes_layers_off_the_last_stage():
    assert [len(x) for x in split_layers(model(10, 1), 4)] == [3, 3, 2, 2]
    big = model(12, 2 * model(12, 1).layer_parts(0).total // 8)  # a head as heavy as two layers
    assert [len(x) for x in split_layers(big, 2)] == [7, 5]
