"""Triton kernels for the second half of LoRA, forward only: y += scale * (h B^T) for each part.

A fused projection (q, k and v; gate and up) has one LoRA pair per part, stored concatenated: h
holds the rank activations of all parts, B the rows of all parts. The kernel rounds where the eager
model rounds: after the product, after the scale, after the sum.

Shape letters: T tokens, O outputs of all parts, P parts, r rank (padded), R = P * r.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

MAX_COLUMNS = 64
MIN_COLUMNS = 16
"""Minimum number of outputs of a program; all belong to one part."""
MAX_TOKENS = 64
RANK_STEP = 32


def reference_add_expanded(
    y_TO: Tensor, h_TR: Tensor, b_Or: Tensor, widths: Sequence[int], scale: float
) -> Tensor:
    parts = zip(h_TR.chunk(len(widths), dim=-1), b_Or.split(list(widths)), strict=True)
    return y_TO + torch.cat([h_Tr @ b.T for h_Tr, b in parts], -1) * scale


def columns_of(widths: Sequence[int]) -> int:
    """The largest tile size that divides all part widths; 0 if the kernel supports none."""
    tile = MAX_COLUMNS
    while tile >= MIN_COLUMNS and any(width % tile for width in widths):
        tile //= 2
    return tile if tile >= MIN_COLUMNS else 0


def add_expanded(
    y_TO: Tensor, h_TR: Tensor, b_Or: Tensor, widths: Sequence[int], scale: float
) -> Tensor:
    """Adds scale * (h B^T) to y in place. Widths are multiples of 16; at most three parts."""
    assert y_TO.is_contiguous() and h_TR.is_contiguous()
    return _launch(y_TO, h_TR, y_TO, b_Or, widths, scale)


def expanded(found_TW: Tensor, b_Or: Tensor, widths: Sequence[int], scale: float) -> Tensor:
    """Returns y + scale * (h B^T) for a product that contains y and, in its last columns, h."""
    num_out = sum(widths)
    assert found_TW.is_contiguous()
    y_TO = found_TW.new_empty(len(found_TW), num_out)
    return _launch(found_TW, found_TW[:, num_out:], y_TO, b_Or, widths, scale)


def _launch(
    y_TO: Tensor, h_TR: Tensor, out_TO: Tensor, b_Or: Tensor, widths: Sequence[int], scale: float
) -> Tensor:
    num_tokens, rank = len(out_TO), b_Or.shape[1]
    columns = columns_of(widths)
    assert b_Or.is_contiguous() and h_TR.shape[1] == len(widths) * rank
    assert columns and len(widths) <= 3 and rank % 16 == 0 and num_tokens > 0
    first, second = widths[0], sum(widths[:2])
    tokens = min(MAX_TOKENS, max(16, triton.next_power_of_2(num_tokens)))
    _add_expanded[(triton.cdiv(num_tokens, tokens), out_TO.shape[1] // columns)](
        y_TO,
        h_TR,
        out_TO,
        b_Or,
        scale,
        num_tokens,
        NUM_OUT=out_TO.shape[1],
        FIRST=first,
        SECOND=second,
        RANK=rank,
        Y_STEP=y_TO.stride(0),
        H_STEP=h_TR.stride(0),
        SCALES=scale != 1.0,
        TOKENS=tokens,
        COLUMNS=columns,
        STEP=RANK_STEP if rank % RANK_STEP == 0 else 16,
        num_warps=4,
    )
    return out_TO


def reference_gated(found_TW: Tensor, b_Or: Tensor, scale: float) -> Tensor:
    width = len(b_Or) // 2
    y_TO, h_TR = found_TW.split([2 * width, found_TW.shape[1] - 2 * width], dim=-1)
    gate_TF, up_TF = reference_add_expanded(y_TO, h_TR, b_Or, (width, width), scale).chunk(2, -1)
    return F.silu(gate_TF) * up_TF


def gated(found_TW: Tensor, b_Or: Tensor, scale: float) -> Tensor:
    """Like `expanded` for gate and up, and returns silu(gate) * up."""
    num_tokens, width, rank = len(found_TW), len(b_Or) // 2, b_Or.shape[1]
    columns = columns_of((width, width))
    assert found_TW.is_contiguous() and b_Or.is_contiguous() and num_tokens > 0
    assert columns and rank % 16 == 0 and found_TW.shape[1] == 2 * (width + rank)
    out_TF = found_TW.new_empty(num_tokens, width)
    tokens = min(MAX_TOKENS, max(16, triton.next_power_of_2(num_tokens)))
    _gated[(triton.cdiv(num_tokens, tokens), width // columns)](
        found_TW,
        b_Or,
        out_TF,
        scale,
        num_tokens,
        WIDTH=width,
        RANK=rank,
        SCALES=scale != 1.0,
        TOKENS=tokens,
        COLUMNS=columns,
        STEP=RANK_STEP if rank % RANK_STEP == 0 else 16,
        num_warps=4,
    )
    return out_TF


@triton.jit
def _adapted(
    y_ptr: tl.tensor,
    h_ptr: tl.tensor,
    b_ptr: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    mask: tl.tensor,
    RANK: tl.constexpr,
    Y_STEP: tl.constexpr,
    H_STEP: tl.constexpr,
    SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """A tile of y + scale * (h B^T). `h_ptr`: of the part that the columns belong to."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    total = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    for at in range(0, RANK, STEP):
        r = at + tl.arange(0, STEP)
        h = tl.load(h_ptr + row[:, None] * H_STEP + r[None, :], mask=mask, other=0.0)
        b = tl.load(b_ptr + column[None, :] * RANK + r[:, None])
        total = tl.dot(h, b, total, input_precision="ieee")
    more = total.to(dtype)
    if SCALES:
        more = (more.to(tl.float32) * scale).to(dtype)
    y = tl.load(y_ptr + row[:, None] * Y_STEP + column[None, :], mask=mask, other=0.0)
    return (y.to(tl.float32) + more.to(tl.float32)).to(dtype)


@triton.jit
def _add_expanded(
    y_ptr: tl.tensor,
    h_ptr: tl.tensor,
    out_ptr: tl.tensor,
    b_ptr: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    NUM_OUT: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    RANK: tl.constexpr,
    Y_STEP: tl.constexpr,
    H_STEP: tl.constexpr,
    SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    begin = tl.program_id(1) * COLUMNS
    part = (begin >= FIRST).to(tl.int32) + (begin >= SECOND).to(tl.int32)
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    column = begin + tl.arange(0, COLUMNS)
    mask = (row < num_tokens)[:, None]
    h_ptr += part * RANK
    y = _adapted(
        y_ptr,
        h_ptr,
        b_ptr,
        scale,
        row,
        column,
        mask,
        RANK,
        Y_STEP,
        H_STEP,
        SCALES,
        TOKENS,
        COLUMNS,
        STEP,
    )
    tl.store(out_ptr + row[:, None] * NUM_OUT + column[None, :], y, mask=mask)


@triton.jit
def _gated(
    found_ptr: tl.tensor,
    b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale: tl.tensor,
    num_tokens: tl.tensor,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_tokens)[:, None]
    wide: tl.constexpr = 2 * (WIDTH + RANK)
    h_ptr = found_ptr + 2 * WIDTH
    gate = _adapted(
        found_ptr,
        h_ptr,
        b_ptr,
        scale,
        row,
        column,
        mask,
        RANK,
        wide,
        wide,
        SCALES,
        TOKENS,
        COLUMNS,
        STEP,
    ).to(tl.float32)
    up = _adapted(
        found_ptr,
        h_ptr + RANK,
        b_ptr,
        scale,
        row,
        column + WIDTH,
        mask,
        RANK,
        wide,
        wide,
        SCALES,
        TOKENS,
        COLUMNS,
        STEP,
    ).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row[:, None] * WIDTH + column[None, :], (silu * up).to(dtype), mask=mask)
