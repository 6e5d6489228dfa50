"""Layouts a model cannot be cut by are refused with what would work."""

import pytest

from pentad.core.dims import ModelDims
from pentad.core.errors import UserError
from pentad.core.fit import check_fit, expert_range, experts_each, heads_work
from pentad.core.layout import Layout


def dims(**changes) -> ModelDims:
    base = {
        "family": "qwen3",
        "vocab_size": 37,
        "hidden_size": 24,
        "num_layers": 2,
        "num_heads": 12,
        "num_kv_heads": 3,
        "head_dim": 8,
        "intermediate_size": 40,
    }
    return ModelDims(**{**base, **changes})


MOE = {"num_experts": 6, "moe_intermediate_size": 9, "moe_layers": (True, False)}


@pytest.mark.parametrize(
    ("layout", "changes", "sentence"),
    [
        (Layout(cp=5), {}, "t1 * c5 = 5 must divide num_heads = 12"),
        (Layout(tp=4), {}, "t4 * c1 = 4 must divide num_kv_heads = 3 or be a multiple"),
        # t*c = 6 is a multiple of 3 kv heads, but t = 2 alone tears one.
        (Layout(tp=2, cp=3), {}, "t2 must divide num_kv_heads = 3 or be a multiple"),
        (Layout(tp=3), {}, "t3 must divide intermediate_size = 40"),
        (Layout(tp=6), {"vocab_size": 8}, "t6 leaves a rank without any of the 8 words"),
        (
            Layout(dp_shard=8, ep=8),
            MOE,
            "num_experts = 6 leave a rank of e8 none; e can be 1, 2, 4 on 8 ranks",
        ),
        (Layout(dp_shard=2, etp=2), MOE, "t2 of ffn must divide moe_intermediate_size = 9"),
        (Layout(dp_shard=2, ep=2), {}, "e2 and t1 of ffn need experts, and the model has none"),
    ],
)
def test_what_does_not_fit_is_refused(layout, changes, sentence):
    with pytest.raises(UserError) as caught:
        check_fit(layout, dims(**changes))
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"layout = {layout}: ")


def test_what_fits_passes():
    check_fit(Layout(dp_shard=2, cp=3), dims())
    check_fit(Layout(dp_shard=3, ep=3, cp=3), dims(**MOE))
    for ep in range(1, 7):
        check_fit(Layout(dp_shard=ep, ep=ep), dims(**MOE))
    assert heads_work(dims(), 3, 4) and heads_work(dims(), 12, 1) and not heads_work(dims(), 2, 1)


@pytest.mark.parametrize(
    ("num_experts", "sizes"),
    [
        (8, [3, 3, 2]),
        (8, [2, 2, 2, 1, 1]),
        (8, [2, 1, 1, 1, 1, 1, 1]),
        (6, [2, 2, 1, 1]),
        (6, [1] * 6),
        (128, [26, 26, 26, 25, 25]),
        (128, [2] * 56 + [1] * 16),
    ],
    ids=str,
)
def test_experts_are_dealt_in_balanced_parts(num_experts, sizes):
    ranges = [range(*expert_range(num_experts, len(sizes), rank)) for rank in range(len(sizes))]
    assert [len(one) for one in ranges] == sizes
    assert [expert for one in ranges for expert in one] == list(range(num_experts))
    assert experts_each(num_experts, len(sizes)) == max(sizes)
