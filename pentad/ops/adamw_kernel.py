"""Triton kernel for one AdamW step over one tensor, with gradient scaling fused in.

The math is that of torch's fused AdamW. Fusing the scale saves one read and one write of the
gradient. bfloat16 tensors are rounded stochastically, with the random bits of `rounding`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.ops.rounding import FIRST, SECOND, THIRD, Place, split_key

BLOCK = 1024
MIX_FIRST, MIX_SECOND, MIX_THIRD = map(tl.constexpr, (FIRST, SECOND, THIRD))
MAX_DIMS = 4


def move(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    corrections: Tensor,
    *,
    scale: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    key: int = 0,
    place: Place | None = None,
) -> None:
    """One AdamW step, in place. `corrections` are 1 - beta1^t and sqrt(1 - beta2^t) of step t in
    fp32; `scale` multiplies the gradient. All tensors are contiguous; math is in fp32. bfloat16
    tensors are rounded stochastically with random bits from `key` and `place`."""
    num = parameter.numel()
    rounds = parameter.dtype == torch.bfloat16
    assert place is not None or not rounds, "random bits depend on an element's place"
    place = place or Place(0, (num,), (1,))
    num_dims = len(place.sizes)
    assert num_dims <= MAX_DIMS, f"{place} has more than {MAX_DIMS} dims"
    missing = (1,) * (MAX_DIMS - num_dims)  # padded in front to MAX_DIMS
    _move[(triton.cdiv(num, BLOCK),)](
        parameter,
        gradient,
        exp_avg,
        exp_avg_sq,
        corrections,
        scale,
        lr,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps,
        lr * weight_decay,
        num,
        *split_key(key),
        place.offset,
        *(*missing, *place.sizes)[1:],
        *(*missing, *place.strides)[:-1],
        ROUNDS=rounds,
        NUM_DIMS=num_dims,
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x ^= x >> 16
    x *= MIX_FIRST
    x ^= x >> 15
    x *= MIX_SECOND
    x ^= x >> 16
    return x


@triton.jit
def _rounded(x: tl.tensor, bits: tl.tensor) -> tl.tensor:
    word = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    is_finite = tl.abs(x) < float("inf")
    return tl.where(is_finite, word.to(tl.float32, bitcast=True), x)


@triton.jit(
    do_not_specialize=["key0", "key1", "offset", "size1", "size2", "size3"]
    + ["stride0", "stride1", "stride2"]
)
def _move(
    parameter_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    exp_avg_ptr: tl.tensor,
    exp_avg_sq_ptr: tl.tensor,
    corrections_ptr: tl.tensor,
    scale: tl.tensor,
    lr: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    decay: tl.tensor,
    num: tl.tensor,
    key0: tl.tensor,
    key1: tl.tensor,
    offset: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    size3: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    ROUNDS: tl.constexpr,
    NUM_DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    gradient = tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale
    first = tl.load(exp_avg_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0).to(tl.float32)
    parameter = tl.load(parameter_ptr + at, mask=mask, other=0.0).to(tl.float32)
    first = beta1 * first + rest1 * gradient
    second = beta2 * second + rest2 * gradient * gradient
    size = tl.sqrt(second) / tl.load(corrections_ptr + 1) + eps
    step = lr / tl.load(corrections_ptr)
    parameter -= decay * parameter + step * first / size
    if ROUNDS:
        index = offset.to(tl.int64) + at
        if NUM_DIMS > 1:
            index = offset.to(tl.int64) + at % size3
            at_dim = at // size3
            if NUM_DIMS > 2:
                index += at_dim % size2 * stride2
                at_dim = at_dim // size2
                if NUM_DIMS > 3:
                    index += at_dim % size1 * stride1
                    index += at_dim // size1 * stride0
                else:
                    index += at_dim * stride1
            else:
                index += at_dim * stride2
        bits = _mix((index & 0xFFFFFFFF).to(tl.uint32) ^ key0.to(tl.uint32))
        bits = _mix((bits + (index >> 32).to(tl.uint32)) ^ key1.to(tl.uint32))
        more = _mix(bits ^ MIX_THIRD)
        parameter = _rounded(parameter, bits & 0xFFFF)
        first = _rounded(first, bits >> 16)
        second = _rounded(second, more & 0xFFFF)
    tl.store(exp_avg_ptr + at, first.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + at, second.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
    tl.store(parameter_ptr + at, parameter.to(parameter_ptr.dtype.element_ty), mask=mask)
