"""An adapter in the sampler: copies of its factors in the layout of the kernels, renewed at each
install.

Factors are installed and compared in float32. Products use copies in their own dtype, which keep
their memory for captured graphs and are padded to a rank that the kernels support. Factors of
several matrices with one input are concatenated: a product with A and a kernel for B add their
output to the base's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from pentad.infer.fuse import FusedAttention
from pentad.models.decoder import Decoder
from pentad.models.lora import ExpertFactors, Factors, factors_of
from pentad.ops.adapter_kernel import add_expanded, columns_of
from pentad.ops.experts import grouped_linear

RANK_STEP = 16
"""Kernels and grouped products support multiples of this rank; factors are padded with zeros."""
FactorCopies = Iterator[tuple[Tensor, Tensor]]
"""A part of a copy, and the factor it copies."""


def padded(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP


class JoinedFactors:
    """Concatenated factors of matrices with one input; None: a matrix without factors."""

    def __init__(self, parts: Sequence[Factors | None], widths: Sequence[int], like: Tensor):
        self.parts, self.widths = parts, list(widths)
        """Number of outputs of each plane; gate and up are two planes of one part."""
        self.some = next(part for part in parts if part is not None)
        self.rank, size = self.some.a.shape[-2:]
        self.a_PrI = like.new_zeros(len(self.widths), padded(self.rank), size)
        self.b_Or = like.new_zeros(sum(self.widths), padded(self.rank))

    def copies(self) -> FactorCopies:
        at = row = 0
        for part in self.parts:
            planes = 1 if part is None else part.num_planes
            height = sum(self.widths[at : at + planes])
            if part is not None:
                yield self.a_PrI[at : at + planes, : self.rank], part.a.view(planes, self.rank, -1)
                yield self.b_Or[row : row + height, : self.rank], part.b.view(height, self.rank)
            at, row = at + planes, row + height

    def add(self, x_TI: Tensor, y_TO: Tensor) -> Tensor:
        """Adds the adapter's output to the product of the base, in place."""
        if not self.some.is_on or not len(x_TI):
            return y_TO
        h_TR = F.linear(x_TI, self.a_PrI.flatten(0, 1))
        return add_expanded(y_TO, h_TR, self.b_Or, self.widths, self.some.scale)


class JoinedExperts:
    """Factors of stacked experts. B of gate and up is one matrix of two blocks, for a single
    grouped product."""

    def __init__(self, part: ExpertFactors, like: Tensor) -> None:
        self.part = part
        *lead, rank, size = part.a.shape
        self.rank = rank
        self.a = like.new_zeros(*lead, padded(rank), size)
        self.b = like.new_zeros(*part.b.shape[:-1], part.num_planes, padded(rank))

    def copies(self) -> FactorCopies:
        yield self.a[..., : self.rank, :], self.part.a
        if self.part.num_planes == 1:
            yield self.b[..., 0, : self.rank], self.part.b
            return
        for plane in range(2):
            own = self.b[..., plane, :, plane, : self.rank]
            yield own, self.part.b[..., plane, :, :]

    def rows(self, x_NI: Tensor, ends_E: Tensor) -> Tensor:
        a, b = self.a, self.b.flatten(-2)
        if self.part.num_planes == 2:
            a, b = a.flatten(-3, -2), b.flatten(-3, -2)
        y_NO = _product(_product(x_NI, a, ends_E), b, ends_E)
        return y_NO if self.part.scale == 1 else y_NO * self.part.scale


def _product(x_NI: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
    return F.linear(x_NI, weight) if weight.ndim == 2 else grouped_linear(x_NI, weight, ends_E)


@dataclass(eq=False)
class JoinedAdapter:
    """All copies of a model's factors."""

    dense: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    other: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Non-contiguous copies, kept separate, because one would slow down the copy of all."""

    def take(self, joined: JoinedFactors | JoinedExperts) -> None:
        for copy, factor in joined.copies():
            is_dense = copy.is_contiguous() and factor.is_contiguous()
            (self.dense if is_dense else self.other).append((copy, factor))

    @torch.no_grad()
    def refresh(self) -> None:
        """Renews the copies after factors were written."""
        for pairs in (self.dense, self.other):
            if pairs:
                torch._foreach_copy_([copy for copy, _ in pairs], [factor for _, factor in pairs])


def join_factors(model: Decoder) -> JoinedAdapter:
    """Gives layers their factors in the layout of the kernels; layers with unsupported widths keep
    the general path."""
    adapter, like = JoinedAdapter(), model.head_weight
    taken: set[Factors] = set()
    for module in model.modules():
        if isinstance(module, FusedAttention):
            hosts = module.q, module.k, module.v
            parts = [getattr(host, "lora", None) for host in hosts]
            widths = [len(host.weight) for host in hosts]
            if any(parts) and columns_of(widths):
                module.adapter = JoinedFactors(parts, widths, like)
                adapter.take(module.adapter)
                taken |= {part for part in parts if part is not None}
    for part in factors_of(model):
        widths = [part.b.shape[-2]] * part.num_planes
        if isinstance(part, ExpertFactors):
            part.stacked = JoinedExperts(part, like)
            adapter.take(part.stacked)
        elif part not in taken and columns_of(widths):
            part.joined = JoinedFactors([part], widths, like)
            adapter.take(part.joined)
    return adapter
