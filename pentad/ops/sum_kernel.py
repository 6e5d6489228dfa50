"""Sums of rows picked by place, as one Triton kernel: how a mixture's results come back to tokens.

`ops.experts` holds the same in plain torch and decides which of the two runs.

Shapes: T tokens, k rows a token, N = T * k rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048


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
