"""An adapter in the sampler: copies of its factors in the layout of the kernels, renewed at each
install.

Factors are installed and compared in float32. Products use copies in their own dtype, which keep
their memory for captured graphs and are padded to a rank that the kernels support. Factors of
several matrices with one input are concatenated. In memory, A follows the rows of the frozen
weights: one product gives their output and that of A, and a kernel for B adds the adapter's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentad.infer.fuse import FusedAttention, FusedMlp
from pentad.models.decoder import Decoder
from pentad.models.joined import adapted_hosts, join_with_room, num_planes, padded
from pentad.models.layers import GateUp, Linear
from pentad.models.lora import ExpertFactors, Factors, factors_of
from pentad.ops.adapter_kernel import add_expanded, columns_of, expanded, gated
from pentad.ops.experts import grouped_linear
from pentad.ops.fused import silu_mul

MAX_WIDE_TOKENS = 1024
"""Above it, the output of A has a product of its own: it is a small part of the time, and the
output of the frozen weights is then written in place."""
FactorCopies = Iterator[tuple[Tensor, Tensor]]
"""A part of a copy, and the factor it copies."""


class JoinedFactors:
    """Concatenated factors of matrices with one input; None: a matrix without factors."""

    def __init__(self, hosts: Sequence[nn.Module], widths: Sequence[int]):
        self.parts: list[Factors | None] = [getattr(host, "lora", None) for host in hosts]
        self.widths = list(widths)
        """Number of outputs of each plane; gate and up are two planes of one part."""
        self.some = next(part for part in self.parts if part is not None)
        self.rank = self.some.a.shape[-2]
        weights: list[Any] = [host.weight for host in hosts]
        size, rank = weights[0].shape[-1], padded(self.rank)
        self.wide_WI = join_with_room(weights, len(self.widths) * rank)
        self.num_out = sum(self.widths)
        self.a_PrI = self.wide_WI[self.num_out :].view(-1, rank, size)
        self.b_Or = self.wide_WI.new_zeros(self.num_out, rank)
        biases: list[Any] = [host.bias for host in hosts if host.bias is not None]
        self.bias_W: Tensor | None = None
        """Bias of the frozen weights, and zeros for A."""
        if biases:
            flat = torch.cat([bias.detach().flatten() for bias in biases])
            self.bias_W = F.pad(flat, (0, len(self.wide_WI) - self.num_out))

    def copies(self) -> FactorCopies:
        at = row = 0
        for part in self.parts:
            planes = 1 if part is None else part.num_planes
            height = sum(self.widths[at : at + planes])
            if part is not None:
                yield self.a_PrI[at : at + planes, : self.rank], part.a.view(planes, self.rank, -1)
                yield self.b_Or[row : row + height, : self.rank], part.b.view(height, self.rank)
            at, row = at + planes, row + height

    def product(self, x_TI: Tensor) -> Tensor:
        """Returns the output of the frozen weights with the adapter's."""
        if self._is_wide(x_TI):
            found_TW = F.linear(x_TI, self.wide_WI, self.bias_W)
            return expanded(found_TW, self.b_Or, self.widths, self.some.scale)
        bias_O = None if self.bias_W is None else self.bias_W[: self.num_out]
        y_TO = F.linear(x_TI, self.wide_WI[: self.num_out], bias_O)
        if not self.some.is_on or not len(x_TI):
            return y_TO
        h_TR = F.linear(x_TI, self.a_PrI.flatten(0, 1))
        return add_expanded(y_TO, h_TR, self.b_Or, self.widths, self.some.scale)

    def gated(self, x_TI: Tensor) -> Tensor:
        """Returns silu(gate) * up for the factors of both."""
        if self._is_wide(x_TI):
            found_TW = F.linear(x_TI, self.wide_WI, self.bias_W)
            return gated(found_TW, self.b_Or, self.some.scale)
        return silu_mul(*self.product(x_TI).chunk(2, dim=-1))

    def _is_wide(self, x_TI: Tensor) -> bool:
        return self.some.is_on and 0 < len(x_TI) <= MAX_WIDE_TOKENS


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
    groups: dict[nn.Module, JoinedFactors] = field(default_factory=dict)
    """Joined factors, by the first of their layers."""

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
    adapter = JoinedAdapter()
    for hosts in adapted_hosts(model, FusedAttention):
        if not all(isinstance(host, Linear | GateUp) for host in hosts):
            continue
        weights: list[Any] = [host.weight for host in hosts]
        widths = [one.shape[-2] for one in weights for _ in range(num_planes(one))]
        if columns_of(widths):
            joined = JoinedFactors(hosts, widths)
            adapter.take(joined)
            for part in filter(None, joined.parts):
                part.joined = joined if len(hosts) == 1 else None
            adapter.groups[hosts[0]] = joined
    for module in model.modules():
        if isinstance(module, FusedAttention):
            module.adapter = adapter.groups.get(module.q)
        elif isinstance(module, FusedMlp):
            module.adapter = adapter.groups.get(module.gate_up)
    for part in factors_of(model):
        if isinstance(part, ExpertFactors):
            part.stacked = JoinedExperts(part, model.head_weight)
            adapter.take(part.stacked)
    return adapter
