"""Loads are those of all ranks together, and so the selection biases move alike on all of them."""

import pytest
from balance_toys import train_balanced

from pentad.core.layout import Layout

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def alone():
    return train_balanced()


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=2, ep=2), Layout(tp=2), Layout(cp=2), Layout(dp_replicate=2), Layout(pp=2)],
    ids=str,
)
def test_balance_and_biases_are_one_ranks(pool, alone, layout):
    """Free routing: a choice may flip by rounding, so a few tokens may count elsewhere."""
    settings = {"pp_schedule": "1F1B"} if layout.pp > 1 else {}
    steps, biases = pool.run(
        layout.world, "balance_toys", "train_balanced", layout=layout, **settings
    )
    for mine, true in zip(steps, alone[0], strict=True):
        assert [one.layer for one in mine] == [one.layer for one in true]
        for a, b in zip(mine, true, strict=True):
            assert a.mean == b.mean, "what fills microbatches up is not counted"
            assert a.max == pytest.approx(b.max, abs=3)
    assert biases.keys() == alone[1].keys()
    for name, bias in biases.items():
        same = sum(abs(x - y) < 1e-6 for x, y in zip(bias, alone[1][name], strict=True))
        assert same >= 6, (name, bias, alone[1][name])
