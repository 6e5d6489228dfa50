"""Triton kernels of the fused lm head: forward and backward read a chunk of logits once each.

`ops.logprob` has the torch version and chooses between the two. Everything is computed in fp32; no
atomics, so results are bitwise repeatable.

Shapes: C tokens of one chunk, V entries of the vocabulary (of this shard).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
NUM_WARPS = 8


def reduce_logits(
    logits_CV: Tensor, inverse_temperature: float, column_C: Tensor, out_4C: Tensor
) -> None:
    """Writes (max, sum of e^d, sum of e^d * d, label's x) with x = logits / temperature and d = x -
    max; label's x is 0 if the label is not in this shard."""
    assert logits_CV.is_contiguous() and logits_CV.dtype == torch.float32
    num_tokens, num_rows = logits_CV.shape
    _reduce[(num_tokens,)](
        logits_CV,
        column_C,
        out_4C,
        out_4C.stride(0),
        inverse_temperature,
        NUM_ROWS=num_rows,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def logit_gradient(
    logits_CV: Tensor,
    inverse_temperature: float,
    column_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    glp_C: Tensor | None,
    gent_C: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the logits, in the dtype of the following matrix products."""
    assert logits_CV.is_contiguous() and logits_CV.dtype == torch.float32
    out_CV = torch.empty_like(logits_CV, dtype=dtype)
    num_tokens, num_rows = logits_CV.shape
    num_blocks = triton.cdiv(num_rows, BLOCK)
    _gradient[(num_tokens * num_blocks,)](
        logits_CV,
        column_C,
        lse_C,
        entropy_C,
        lse_C if glp_C is None else glp_C,
        lse_C if gent_C is None else gent_C,
        out_CV,
        inverse_temperature,
        HAS_LOGPROB=glp_C is not None,
        HAS_ENTROPY=gent_C is not None,
        NUM_ROWS=num_rows,
        NUM_BLOCKS=num_blocks,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out_CV


@triton.jit
def _reduce(
    logits_ptr: tl.tensor,
    column_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    NUM_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * NUM_ROWS
    v = tl.arange(0, BLOCK)
    # Each lane keeps its own sums, so the loop has no synchronization. The first maximum is finite,
    # since inf - inf would be nan.
    top = tl.full([BLOCK], -1e38, dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    weighted = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, NUM_ROWS, BLOCK):
        mask = start + v < NUM_ROWS
        x = tl.load(logits_ptr + start + v, mask=mask, other=0.0) * scale
        new_top = tl.where(mask, tl.maximum(top, x), top)
        fall = top - new_top
        shrink = tl.exp(fall)
        d = tl.where(mask, x - new_top, 0.0)
        e = tl.where(mask, tl.exp(d), 0.0)
        weighted = shrink * (weighted + fall * total) + e * d
        total = shrink * total + e
        top = new_top
    best = tl.max(top, 0)
    fall = top - best
    shrink = tl.exp(fall)
    column = tl.load(column_ptr + token)
    is_here = (column >= 0) & (column < NUM_ROWS)
    label = tl.load(logits_ptr + column, mask=is_here, other=0.0) * scale
    out_ptr += token
    tl.store(out_ptr, best)
    tl.store(out_ptr + stride, tl.sum(shrink * total, 0))
    tl.store(out_ptr + 2 * stride, tl.sum(shrink * (weighted + fall * total), 0))
    tl.store(out_ptr + 3 * stride, label)


@triton.jit
def _gradient(
    logits_ptr: tl.tensor,
    column_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    glp_ptr: tl.tensor,
    gent_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale: tl.tensor,
    HAS_LOGPROB: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = (tl.program_id(0) // NUM_BLOCKS).to(tl.int64)
    v = (tl.program_id(0) % NUM_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    mask = v < NUM_ROWS
    x = tl.load(logits_ptr + token * NUM_ROWS + v, mask=mask, other=0.0) * scale
    logp = x - tl.load(lse_ptr + token)
    # d logp(label) / dx = onehot - p,   d entropy / dx = -p * (log p + entropy)
    slope = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_ENTROPY:
        slope += tl.load(gent_ptr + token) * (logp + tl.load(entropy_ptr + token))
    if HAS_LOGPROB:
        slope += tl.load(glp_ptr + token)
    out = -tl.exp(logp) * slope
    if HAS_LOGPROB:
        is_label = v == tl.load(column_ptr + token)
        out += tl.where(is_label, tl.load(glp_ptr + token), 0.0)
    out = (out * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * NUM_ROWS + v, out, mask=mask)
