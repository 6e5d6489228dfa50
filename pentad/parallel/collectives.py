"""Collectives with gradients, over an `Axis`; each does nothing if the axis has one rank.

They are named by their effect on the value; the gradient follows from which ranks use the result.
Built on torch's functional collectives, which torch.compile can trace.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def reduce_ranks(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The sum (max, min) over the ranks, a new tensor, without a gradient."""
    if axis.size == 1:
        return x
    return _wait(_ops.all_reduce(x.contiguous(), op, axis.name))


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scatter(grads[0], ctx.axis), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.axis), None


class _GatherShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gather(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.axis.size)[ctx.axis.rank], None


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_ranks(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_ranks(grads[0], ctx.axis), None


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


def _apply(function: type[torch.autograd.Function], x: Tensor, axis: Axis, *sizes: Any) -> Tensor:
    if axis.size == 1:
        return x
    result: Tensor = function.apply(x, axis, *sizes)
    return result


def gather_parts(x: Tensor, axis: Axis) -> Tensor:
    """Concatenates all ranks' rows; each rank then computes something different from them, so the
    gradients are summed."""
    return _apply(_GatherParts, x, axis)


def scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    """This rank's share of the rows of the sum over ranks."""
    return _apply(_ScatterSum, x, axis)


def gather_shared(x: Tensor, axis: Axis) -> Tensor:
    """Concatenates all ranks' rows, from which all ranks compute the same: the gradient counts
    once."""
    return _apply(_GatherShared, x, axis)


def sum_ranks(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks, of which each rank computes a part: gradients are summed."""
    return _apply(_SumRanks, x, axis)


def exchange(x: Tensor, axis: Axis, out_sizes: Sequence[int], in_sizes: Sequence[int]) -> Tensor:
    """Exchanges rows: in_sizes[r] are sent to rank r, out_sizes[r] are received from it."""
    return _apply(_Exchange, x, axis, out_sizes, in_sizes)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_ranks(grads[0], ctx.axis), None


class _SumShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return reduce_ranks(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.chunk(axis.size)[axis.rank]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.axis), None


def share(x: Tensor, axis: Axis) -> Tensor:
    """A value equal on all ranks, from which each computes a part: gradients are summed."""
    return _apply(_Share, x, axis)


def sum_shared(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks, from which all ranks compute the same: its gradient counts once."""
    return _apply(_SumShared, x, axis)


def deal(x: Tensor, axis: Axis) -> Tensor:
    """This rank's share of rows that are equal on all ranks; the gradient is gathered."""
    return _apply(_Deal, x, axis)
