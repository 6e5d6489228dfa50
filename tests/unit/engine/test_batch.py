"""Packing rows: the turn between alignments, and sums over sequences."""

import pytest
import torch

from pentad.core.errors import RunError
from pentad.core.types import Row
from pentad.engine.batch import PackedSegments, check_rows, pack_rows, split_out

CPU = torch.device("cpu")


def row(ids, **columns) -> Row:
    return Row(torch.tensor(ids), {k: torch.tensor(v) for k, v in columns.items()})


def test_columns_turn_to_the_position_that_predicts():
    rows = [row([5, 6, 7], w=[0.0, 0.1, 0.2]), row([8], w=[0.9]), row([3, 4], w=[0.0, 0.5])]
    packed = pack_rows(rows, ("w",), CPU)
    assert packed.ids_U.tolist() == [5, 6, 7, 8, 3, 4]
    assert packed.positions_U.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.labels_U.tolist() == [6, 7, -1, -1, 4, -1]
    torch.testing.assert_close(packed.columns["w"], torch.tensor([0.1, 0.2, 0, 0, 0.5, 0]))


def test_outputs_turn_back_to_their_token():
    parts = split_out(torch.tensor([1.0, 2, 99, 99, 5, 99]), [3, 1, 2])
    assert [x.tolist() for x in parts] == [[0, 1, 2], [0], [0, 5]]


def test_segment_sums_and_their_gradients():
    segments = PackedSegments(torch.tensor([3, 1, 2]), 6)
    x = torch.arange(6.0, dtype=torch.float64, requires_grad=True)
    assert segments.num == 3
    assert segments.sum(x).tolist() == [3, 3, 9]
    assert segments.spread(torch.tensor([1.0, 2, 3])).tolist() == [1, 1, 1, 2, 3, 3]
    assert torch.autograd.gradcheck(segments.sum, (x,))
    y = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(segments.spread, (y,))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row([1, 2], w=[0.0, 1.0]), row([1])], "row 1 has no column w, which the loss reads"),
        ([row([1, 2], w=[0.0])], r"row 0: column w has shape \(1,\) for 2 ids"),
        ([row([1], w=[0.0]), row([1, 50], w=[0.0, 1.0])], "row 1 holds token id 50, outside"),
        ([row([-1, 2], w=[0.0, 1.0])], "row 0 holds token id -1, outside the vocabulary of 50"),
        ([Row(torch.zeros(0, dtype=torch.long), {})], "row 0 has ids of shape"),
    ],
)
def test_a_row_that_does_not_fit_is_named(rows, message):
    with pytest.raises(RunError, match=message):
        check_rows(rows, ("w",), 50)
