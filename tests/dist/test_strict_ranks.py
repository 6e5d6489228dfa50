"""Strict scores do not depend on how many ranks share the rows or the layers."""

import pytest
from strict_cases import scores

from pentad.core.layout import Layout

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("model", ["dense", "mixture"])
@pytest.mark.parametrize(
    "layout", [Layout(dp_shard=2), Layout(dp_replicate=2), Layout(pp=2)], ids=str
)
def test_strict_scores_are_one_ranks_bit_for_bit(pool, model, layout):
    assert pool.run(2, "strict_cases", "scores", model=model, layout=layout) == scores(model)
