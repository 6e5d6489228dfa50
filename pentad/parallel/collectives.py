"""Collectives with gradients, over an `Axis`; each does nothing if the axis has one rank.

Names describe the effect on the value; the gradient depends on which ranks use the result. Built on
torch's functional collectives, which torch.compile can trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pentad.parallel.mesh import Axis

_ops = torch.ops._c10d_functional


def _gather(x: Tensor, axis: Axis) -> Tensor:
    out = _ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.name)
    return _wait(out)


def _scatter(x: Tensor, axis: Axis) -> Tensor:
    out = _ops.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.name)
    return _wait(out)


def _swap(x: Tensor, axis: Axis, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> Tensor:
    out = _ops.all_to_all_single(x.contiguous(), list(out_sizes), list(in_sizes), axis.name)
    return _wait(out)


def _wait(x: Tensor) -> Tensor:
    result: Tensor = _ops.wait_tensor(x)
    return result


def _own_rows(x: Tensor, axis: Axis) -> Tensor:
    return x.chunk(axis.size)[axis.rank]


def _alias(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x


def reduce_ranks(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """Returns the sum (max, min) over the ranks as a new tensor, without a gradient."""
    if axis.size == 1:
        return x
    return _wait(_ops.all_reduce(x.contiguous(), op, axis.name))


Change = Callable[[Tensor, Axis], Tensor]


class _Collective(torch.autograd.Function):
    """A collective `change` whose gradient is `undo` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, change: Change, undo: Change) -> Tensor:
        ctx.axis, ctx.undo = axis, undo
        return change(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.undo(grads[0], ctx.axis), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, out_sizes: Sequence[int], in_sizes: Sequence[int]
    ) -> Tensor:
        ctx.axis, ctx.out_sizes, ctx.in_sizes = axis, out_sizes, in_sizes
        return _swap(x, axis, out_sizes, in_sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _swap(grads[0], ctx.axis, ctx.in_sizes, ctx.out_sizes), None, None, None


def _apply(function: type[torch.autograd.Function], x: Tensor, axis: Axis, *given: Any) -> Tensor:
    if axis.size == 1:
        return x
    result: Tensor = function.apply(x, axis, *given)
    return result


def gather_parts(x: Tensor, axis: Axis) -> Tensor:
    """Concatenates all ranks' rows, for different computations on each rank: gradients are
    summed."""
    return _apply(_Collective, x, axis, _gather, _scatter)


def scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's share of the rows of the sum over ranks."""
    return _apply(_Collective, x, axis, _scatter, _gather)


def gather_shared(x: Tensor, axis: Axis) -> Tensor:
    """Concatenates all ranks' rows, for the same computation on all ranks: the gradient counts
    once."""
    return _apply(_Collective, x, axis, _gather, _own_rows)


def sum_ranks(x: Tensor, axis: Axis) -> Tensor:
    """Sums over ranks, for different computations on each rank: gradients are summed."""
    return _apply(_Collective, x, axis, reduce_ranks, reduce_ranks)


def exchange(x: Tensor, axis: Axis, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> Tensor:
    """Exchanges rows: in_sizes[r] are sent to rank r, out_sizes[r] are received from it."""
    return _apply(_Exchange, x, axis, out_sizes, in_sizes)


def share(x: Tensor, axis: Axis) -> Tensor:
    """Shares a value equal on all ranks, for different computations: gradients are summed."""
    return _apply(_Collective, x, axis, _alias, reduce_ranks)


def sum_shared(x: Tensor, axis: Axis) -> Tensor:
    """Sums over ranks, for the same computation on all ranks: the gradient counts once."""
    return _apply(_Collective, x, axis, reduce_ranks, _same)


def deal(x: Tensor, axis: Axis) -> Tensor:
    """Returns this rank's share of rows that are equal on all ranks; the gradient is gathered."""
    return _apply(_Collective, x, axis, _own_rows, _gather)
