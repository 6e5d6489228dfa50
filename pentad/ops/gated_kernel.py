"""Triton kernels for silu(gate) * up and its gradient: each tensor is read or written once.

`ops.gated` has the torch version and chooses between the two. Forward is the sampler's kernel,
which rounds where torch does; the gradient is computed in fp32 and rounded once. No atomics:
results are bitwise repeatable, and rows do not depend on each other.

These are custom ops, not autograd functions: in compiled code of torch 2.11, recomputation of whole
layers keeps the results of autograd functions, but recomputes custom ops.

Shapes: T rows, F width, G = 2F: gate and up side by side.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.ops import fused

MAX_BLOCK = 1024


@torch.library.custom_op(
    "pentad::silu_mul", mutates_args=(), schema="(Tensor h, Tensor? weights) -> Tensor"
)
def silu_mul(h: Tensor, weights: Tensor | None) -> Tensor:
    """silu(gate) * up of h_TG, each row times its weight if weights_T are given."""
    gate, up = _dense_rows(h).chunk(2, dim=-1)
    return fused.silu_mul(gate, up, None if weights is None else weights.contiguous())


@silu_mul.register_fake
def _(h: Tensor, weights: Tensor | None) -> Tensor:
    return h.new_empty((h.shape[0], h.shape[1] // 2))


@torch.library.custom_op(
    "pentad::silu_mul_gradient", mutates_args=(), schema="(Tensor grad, Tensor h) -> Tensor"
)
def silu_mul_gradient(grad: Tensor, h: Tensor) -> Tensor:
    """Gradient of h_TG, given the gradient of the result."""
    out = h.new_empty(h.shape)
    _launch(grad, h, None, out, None)
    return out


@silu_mul_gradient.register_fake
def _(grad: Tensor, h: Tensor) -> Tensor:
    return h.new_empty(h.shape)


@torch.library.custom_op(
    "pentad::weighted_silu_mul_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor h, Tensor weights) -> (Tensor, Tensor)",
)
def weighted_silu_mul_gradient(grad: Tensor, h: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of h_TG and weights_T."""
    out, dweights = h.new_empty(h.shape), weights.new_empty(weights.shape)
    _launch(grad, h, weights, out, dweights)
    return out, dweights


@weighted_silu_mul_gradient.register_fake
def _(grad: Tensor, h: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), weights.new_empty(weights.shape)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    h, weights = ctx.saved_tensors
    if weights is None:
        return torch.ops.pentad.silu_mul_gradient(grad, h), None
    dh, dweights = torch.ops.pentad.weighted_silu_mul_gradient(grad, h, weights)
    return dh, dweights


silu_mul.register_autograd(_differentiate, setup_context=_remember)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _launch(
    grad: Tensor, h: Tensor, weights: Tensor | None, out: Tensor, dweights: Tensor | None
) -> None:
    """Launches the kernel. With weights one program handles a whole row, to sum over it."""
    num_rows, width = grad.shape
    assert h.shape == (num_rows, 2 * width), f"{tuple(grad.shape)} of {tuple(h.shape)}"
    if out.numel() == 0:
        return
    grad, h = _dense_rows(grad), _dense_rows(h)
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    span = block if weights is None else width
    _gradient[(num_rows * triton.cdiv(width, span),)](
        grad,
        h,
        h if weights is None else weights.contiguous(),
        out,
        out if dweights is None else dweights,
        grad.stride(0),
        h.stride(0),
        HAS_WEIGHTS=weights is not None,
        WIDTH=width,
        SPAN=span,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _gradient(
    grad_ptr: tl.tensor,
    h_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    dweights_ptr: tl.tensor,
    grad_stride: tl.tensor,
    h_stride: tl.tensor,
    HAS_WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    parts: tl.constexpr = (WIDTH + SPAN - 1) // SPAN
    row = (tl.program_id(0) // parts).to(tl.int64)
    first = (tl.program_id(0) % parts) * SPAN
    grad_ptr += row * grad_stride
    h_ptr += row * h_stride
    out_ptr += row * 2 * WIDTH
    if HAS_WEIGHTS:
        weight = tl.load(weights_ptr + row).to(tl.float32)
        total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, SPAN, BLOCK):
        f = first + start + tl.arange(0, BLOCK)
        mask = f < WIDTH
        d = tl.load(grad_ptr + f, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(h_ptr + f, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h_ptr + WIDTH + f, mask=mask, other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * s
        if HAS_WEIGHTS:
            total += d * silu * up
            d *= weight
        # silu'(g) = s * (1 + g * (1 - s))
        dgate = d * up * (s * (1.0 + gate * (1.0 - s)))
        tl.store(out_ptr + f, dgate.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out_ptr + WIDTH + f, (d * silu).to(out_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHTS:
        tl.store(dweights_ptr + row, tl.sum(total, 0).to(dweights_ptr.dtype.element_ty))
