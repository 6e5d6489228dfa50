"""A step of AdamW over one large tensor as a Triton kernel, with the gradient's scale in it.

What torch's fused AdamW computes, at the speed of a copy: torch's own reads 16-bit numbers at half
of it, and a gradient that is scaled before is read and written once more.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


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
) -> None:
    """`corrections` are 1 - beta1^t and sqrt(1 - beta2^t) of the step t that is made, in fp32; the
    gradient is multiplied by `scale`. All tensors are contiguous; math is in fp32."""
    num = parameter.numel()
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
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit
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
    tl.store(exp_avg_ptr + at, first.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + at, second.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
    tl.store(parameter_ptr + at, parameter.to(parameter_ptr.dtype.element_ty), mask=mask)
