"""Mixture-of-experts (MoE) layers: pairs sorted by expert, grouped GEMMs, results summed per token.

A *pair* is a token with one of its chosen experts. Pairs are sorted by expert, so that each expert
has a contiguous run of rows; end offsets of the runs are on the device, so there is no host
synchronization. Rows are gathered and summed by permutation, without atomics: results and gradients
are bitwise repeatable.

Shapes: T tokens, k experts a token, N = T * k pairs, E experts, D width, M expert width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    from pentad.ops.sum_kernel import sum_places
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

ALIGNMENT_BYTES = 16
"""Alignment of rows that torch requires in grouped products."""
GROUPED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Pairs(NamedTuple):
    """All (token, expert) pairs, sorted by expert."""

    order_N: Tensor
    """Index of the flat pair (token * k + slot) at each place."""
    place_N: Tensor
    """Place of each flat pair: the inverse of the order."""
    token_N: Tensor
    """Token of the pair at each place."""
    ends_E: Tensor
    """int32: the place after the last row of each expert."""
    num_chosen: int

    @property
    def sizes_E(self) -> Tensor:
        """Number of rows of each expert."""
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1))


def sort_pairs(chosen_Tk: Tensor, num_experts: int) -> Pairs:
    """Sorts pairs by expert; pairs of one expert stay in token order."""
    assert num_experts <= torch.iinfo(torch.int16).max, f"{num_experts} experts"
    num_chosen = chosen_Tk.shape[1]
    # A narrow sort key: radix sort makes one pass per byte.
    expert_N, order_N = chosen_Tk.flatten().to(torch.int16).sort(stable=True)
    experts_E = torch.arange(num_experts, dtype=torch.int16, device=chosen_Tk.device)
    ends_E = torch.searchsorted(expert_N, experts_E, side="right", out_int32=True)
    places_N = torch.arange(order_N.numel(), device=order_N.device)
    place_N = torch.empty_like(order_N).scatter(0, order_N, places_N)
    return Pairs(order_N, place_N, order_N // num_chosen, ends_E, num_chosen)


def take_rows(x_TD: Tensor, pairs: Pairs) -> Tensor:
    """Gathers the token of each pair: [N, D] in the order of the pairs."""
    result: Tensor = _Take.apply(x_TD, pairs.token_N, pairs.place_N, pairs.num_chosen)
    return result


def take_weights(weights_Tk: Tensor, pairs: Pairs) -> Tensor:
    """Gathers the router weight of each pair: [N] in the order of the pairs."""
    flat_N1 = weights_Tk.reshape(-1, 1)
    result: Tensor = _Take.apply(flat_N1, pairs.order_N, pairs.place_N, 1)
    return result.squeeze(1)


def sum_rows(y_ND: Tensor, pairs: Pairs) -> Tensor:
    """Sums the rows of each token over its pairs: [T, D]."""
    result: Tensor = _Sum.apply(y_ND, pairs.token_N, pairs.place_N, pairs.num_chosen)
    return result


def _sum_at(y_ND: Tensor, place_N: Tensor, num_chosen: int) -> Tensor:
    if num_chosen == 1:
        return y_ND[place_N]
    if HAS_TRITON and y_ND.is_cuda and y_ND.dtype != torch.float64:
        result: Tensor = sum_places(y_ND, place_N, num_chosen)
        return result
    return y_ND[place_N].unflatten(0, (-1, num_chosen)).sum(1)


# `_Take` and `_Sum` are each other's backward.
class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source_N: Tensor, place_N: Tensor, num_chosen: int) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.num_chosen = num_chosen
        return x[source_N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place_N,) = ctx.saved_tensors
        return _sum_at(grads[0], place_N, ctx.num_chosen), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, source_N: Tensor, place_N: Tensor, num_chosen: int) -> Tensor:
        ctx.save_for_backward(source_N)
        return _sum_at(y, place_N, num_chosen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (source_N,) = ctx.saved_tensors
        return grads[0][source_N], None, None, None


def add_rows(x_NO: Tensor, rows_EO: Tensor, ends_E: Tensor) -> Tensor:
    """Adds the bias row of expert e to the rows of expert e."""
    result: Tensor = _AddRows.apply(x_NO, rows_EO, ends_E)
    return result


class _AddRows(torch.autograd.Function):
    """Forward of `add_rows`; backward sums each expert's rows in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x_NO: Tensor, rows_EO: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        ctx.dtype = rows_EO.dtype
        places_N = torch.arange(len(x_NO), dtype=ends_E.dtype, device=x_NO.device)
        expert_N = torch.searchsorted(ends_E, places_N, right=True)
        return x_NO + rows_EO.index_select(0, expert_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (ends_E,) = ctx.saved_tensors
        sizes_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
        wide_NO = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32))
        sums_EO = torch.segment_reduce(wide_NO, "sum", lengths=sizes_E, unsafe=True)
        return grads[0], sums_EO.to(ctx.dtype), None


def grouped_linear(x_ND: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Grouped GEMM: x @ weight[e]^T for the rows of each expert e."""
    if can_group(x_ND, weight_EOD):
        return F.grouped_mm(x_ND, weight_EOD.transpose(-2, -1), offs=ends_E)
    return loop_linear(x_ND, weight_EOD, ends_E)


def can_group(x_ND: Tensor, weight_EOD: Tensor) -> bool:
    """Whether torch has a grouped GEMM for these dtypes and widths."""
    step = ALIGNMENT_BYTES // x_ND.element_size()
    is_aligned = x_ND.shape[1] % step == 0 and weight_EOD.shape[1] % step == 0
    is_known = x_ND.dtype in GROUPED_DTYPES and weight_EOD.dtype == x_ND.dtype
    # torch.compile supports only bf16.
    is_traced = torch.compiler.is_compiling() and x_ND.dtype != torch.bfloat16
    return is_aligned and is_known and not is_traced and x_ND.shape[0] > 0


def loop_linear(x_ND: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_linear` as a loop over experts for any dtype. Synchronizes with the device."""
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    if not sizes:
        return x_ND.new_empty(0, weight_EOD.shape[1])
    parts = zip(x_ND.split(sizes), weight_EOD.unbind(), strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts])


def reference_mixture(
    x_TD: Tensor,
    weights_Tk: Tensor,
    chosen_Tk: Tensor,
    gate_up_E2MD: Tensor,
    down_EDM: Tensor,
) -> Tensor:
    """Reference implementation of the whole mixture: every expert over all tokens."""
    out_TD = torch.zeros_like(x_TD)
    for e, (gate_up_2MD, down_DM) in enumerate(zip(gate_up_E2MD, down_EDM, strict=True)):
        weight_T = torch.where(chosen_Tk == e, weights_Tk, 0).sum(-1)
        gate, up = x_TD @ gate_up_2MD[0].T, x_TD @ gate_up_2MD[1].T
        y_TD = (F.silu(gate) * up) @ down_DM.T
        out_TD = out_TD + weight_T[:, None].to(x_TD.dtype) * y_TD
    return out_TD
