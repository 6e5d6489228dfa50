"""Rows over flat tensors equal single rows, whatever part of a batch is read."""

import torch

from pentad.core.flat_rows import (
    FlatRows,
    has_column,
    join_column,
    join_ids,
    lengths_of,
    select,
)

LENGTHS = [3, 1, 4, 2]


def rows() -> FlatRows:
    ids = torch.arange(10)
    columns = {"weights": ids.float(), "advantages": -ids.float()}
    return FlatRows(ids, columns, LENGTHS, [1.0, 0.0, 2.5, 2.0], [7, 7, 8, None])


def assert_equal(flat, plain) -> None:
    assert len(flat) == len(plain)
    for one, other in zip(flat, plain, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert (one.count, one.group, one.routes) == (other.count, other.group, None)
        assert one.columns.keys() == other.columns.keys()
        assert all(torch.equal(one.columns[name], other.columns[name]) for name in one.columns)
    assert lengths_of(flat) == lengths_of(plain)
    assert torch.equal(join_ids(flat), join_ids(plain))
    assert torch.equal(join_column(flat, "advantages"), join_column(plain, "advantages"))


def test_any_selection_equals_that_of_single_rows():
    flat, plain = rows(), list(rows())
    assert [row.ids.tolist() for row in plain] == [[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]]
    assert_equal(flat, plain)
    for indices in ([2], [3, 0], [1, 2, 3], [0, 1, 2, 3], []):
        assert_equal(select(flat, indices), select(plain, indices))
        assert_equal(select(select(flat, [3, 2, 0]), [1, 0]), [plain[2], plain[3]])
    assert_equal(flat[1:3], plain[1:3])
    assert_equal(flat[:0], [])
    assert torch.equal(flat[-1].ids, plain[-1].ids)


def test_columns_are_known_without_rows():
    flat = rows()
    assert has_column(flat, "weights")
    assert not has_column(flat, "values")
    assert has_column(list(flat), "weights")
    assert not has_column(list(flat), "values")
