"""Rows of the learner over flat tensors: a `Row` is made only when one is read.

A batch has thousands of rows with several columns each. Views of each would take longer to make,
and to join again, than all other work before the first kernel of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import overload

import numpy as np
import torch
from torch import Tensor

from pentad.core.types import Row


class FlatRows(Sequence[Row]):
    """Rows with the same columns, without routes."""

    def __init__(
        self,
        ids_T: Tensor,
        columns: Mapping[str, Tensor],
        lengths: Sequence[int],
        counts: Sequence[float],
        groups: Sequence[int | None],
        starts: np.ndarray | None = None,
    ) -> None:
        """`starts`: first token of each row, if the rows are some of those of the tensors."""
        self.ids_T = ids_T
        self.columns = columns
        self.lengths = list(lengths)
        self.counts = list(counts)
        self.groups = list(groups)
        self.is_whole = starts is None
        length_S = np.asarray(self.lengths, dtype=np.int64)
        self.starts = np.cumsum(length_S) - length_S if starts is None else starts

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> FlatRows: ...

    def __getitem__(self, index: int | slice) -> Row | FlatRows:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        start, length = int(self.starts[index]), self.lengths[index]
        columns = {name: x_T[start : start + length] for name, x_T in self.columns.items()}
        ids = self.ids_T[start : start + length]
        return Row(ids, columns, self.counts[index], group=self.groups[index])

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def take(self, indices: Sequence[int]) -> FlatRows:
        """Some of the rows, over the same tensors."""
        picked = (
            [values[i] for i in indices] for values in (self.lengths, self.counts, self.groups)
        )
        lengths, counts, groups = picked
        starts = self.starts[np.asarray(indices, dtype=np.int64)]
        return FlatRows(self.ids_T, self.columns, lengths, counts, groups, starts)  # type: ignore[arg-type]

    @cached_property
    def places_T(self) -> Tensor | None:
        """The places of the rows' tokens in the tensors; None: all of them."""
        if self.is_whole:
            return None
        length_S = np.asarray(self.lengths, dtype=np.int64)
        first_S = np.cumsum(length_S) - length_S
        places = np.arange(int(length_S.sum())) + np.repeat(self.starts - first_S, length_S)
        return torch.from_numpy(places)

    def joined(self, x_T: Tensor) -> Tensor:
        """The tokens of these rows."""
        return x_T if self.places_T is None else x_T.index_select(0, self.places_T)


def lengths_of(rows: Sequence[Row]) -> list[int]:
    return rows.lengths if isinstance(rows, FlatRows) else [row.ids.numel() for row in rows]


def join_ids(rows: Sequence[Row]) -> Tensor:
    """The ids of all rows, one after the other."""
    if isinstance(rows, FlatRows):
        return rows.joined(rows.ids_T)
    return torch.cat([row.ids for row in rows]) if rows else torch.zeros(0, dtype=torch.int64)


def join_column(rows: Sequence[Row], name: str) -> Tensor:
    if isinstance(rows, FlatRows):
        return rows.joined(rows.columns[name])
    return torch.cat([row.columns[name] for row in rows]) if rows else torch.zeros(0)


def has_column(rows: Sequence[Row], name: str) -> bool:
    """Whether all rows have the column."""
    if isinstance(rows, FlatRows):
        return name in rows.columns
    return all(name in row.columns for row in rows)


def select(rows: Sequence[Row], indices: Sequence[int]) -> Sequence[Row]:
    return rows.take(indices) if isinstance(rows, FlatRows) else [rows[i] for i in indices]
