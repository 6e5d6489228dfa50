"""Triton kernels for sums: rows gathered by index (MoE results of a token, gradients of repeated
keys), and 16-bit tensors added to wider ones (gradients to fp32 accumulators).

The callers have the torch versions and choose between the two.

Shapes: T tokens, k rows per token, N = T * k rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048
ADD_BLOCK = 4096


@torch.library.custom_op(
    "pentad::sum_places",
    mutates_args=(),
    schema="(Tensor rows, Tensor places, int num_chosen) -> Tensor",
)
def sum_places(rows: Tensor, places: Tensor, num_chosen: int) -> Tensor:
    """Row t: the sum of rows[places[t * k]] to rows[places[t * k + k - 1]], added up in fp32."""
    rows = rows.contiguous()
    width, num_tokens = rows.shape[1], places.shape[0] // num_chosen
    out = rows.new_empty((num_tokens, width))
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    if out.numel():
        _sum_places[(num_tokens, triton.cdiv(width, block))](
            rows, places, out, WIDTH=width, NUM_CHOSEN=num_chosen, BLOCK=block, num_warps=4
        )
    return out


@sum_places.register_fake
def _(rows: Tensor, places: Tensor, num_chosen: int) -> Tensor:
    return rows.new_empty((places.shape[0] // num_chosen, rows.shape[1]))


@triton.jit
def _sum_places(
    rows_ptr: tl.tensor,
    places_ptr: tl.tensor,
    out_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < WIDTH
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in tl.static_range(NUM_CHOSEN):
        place = tl.load(places_ptr + token * NUM_CHOSEN + j)
        total += tl.load(rows_ptr + place * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + d, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_spans(rows: Tensor, order_E: Tensor, bounds_U: Tensor) -> Tensor:
    """Entry u: the sum of rows[order[bounds[u]]] to rows[order[bounds[u + 1] - 1]], in fp32."""
    rows = rows.contiguous()
    num, width = len(bounds_U) - 1, rows[0].numel()
    out = rows.new_empty((num, *rows.shape[1:]))
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    if out.numel():
        _sum_spans[(num, triton.cdiv(width, block))](
            rows, order_E, bounds_U, out, WIDTH=width, BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def _sum_spans(
    rows_ptr: tl.tensor,
    order_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    out_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    entry = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < WIDTH
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(tl.load(bounds_ptr + entry), tl.load(bounds_ptr + entry + 1)):
        place = tl.load(order_ptr + j)
        total += tl.load(rows_ptr + place * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + entry * WIDTH + d, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_into(total: Tensor, part: Tensor) -> None:
    """total += part for unequal dtypes; torch's own kernel reads one element at a time."""
    assert total.is_contiguous() and part.is_contiguous() and total.shape == part.shape
    num = total.numel()
    if num:
        _add_into[(triton.cdiv(num, ADD_BLOCK),)](total, part, num, BLOCK=ADD_BLOCK, num_warps=8)


@triton.jit
def _add_into(
    total_ptr: tl.tensor, part_ptr: tl.tensor, num: tl.tensor, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    total = tl.load(total_ptr + at, mask=mask, other=0.0)
    part = tl.load(part_ptr + at, mask=mask, other=0.0).to(total.dtype)
    tl.store(total_ptr + at, total + part, mask=mask)
