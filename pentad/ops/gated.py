"""Gated activation (SwiGLU) of a feed-forward: silu(gate) * up, with gate and up in one tensor.

On a GPU one kernel computes the gradient. A compiled version reads the inputs once per half. The
kernel recomputes silu(gate) from the inputs, so it is not kept for backward.

Shapes: T rows (of experts: N), F width (of experts: M), G = 2F.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pentad.core.dims import CLAMP_LIMIT, CLAMP_SLOPE

try:
    from pentad.ops.gated_kernel import silu_mul as kernel_silu_mul
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True


def has_kernel(h_TG: Tensor) -> bool:
    """Whether the Triton kernels are used; dtypes wider than 16 bit use plain torch."""
    return HAS_TRITON and h_TG.is_cuda and h_TG.dtype.itemsize == 2


def silu_mul(h_TG: Tensor) -> Tensor:
    """silu(gate) * up for dense feed-forwards; the same bits with and without autograd."""
    if has_kernel(h_TG):
        result: Tensor = kernel_silu_mul(h_TG, None)
        return result
    gate, up = h_TG.chunk(2, dim=-1)
    return F.silu(gate) * up


def weighted(a_NM: Tensor, weights_N: Tensor | None) -> Tensor:
    """Rows times their weights, if given, in the dtype of the rows."""
    if weights_N is None:
        return a_NM
    y_NM = a_NM * weights_N[:, None]
    # No `to` for equal dtypes: compiled by torch 2.11, its result has no gradient.
    return y_NM if y_NM.dtype == a_NM.dtype else y_NM.to(a_NM.dtype)


def weighted_gelu_mul(h_NG: Tensor, weights_N: Tensor | None) -> Tensor:
    """weight * gelu(gate) * up, gelu by tanh."""
    gate, up = h_NG.chunk(2, dim=-1)
    return weighted(F.gelu(gate, approximate="tanh") * up, weights_N)


def clamped_mul(
    h_NG: Tensor,
    weights_N: Tensor | None,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> Tensor:
    """Clamped variant with interleaved gate and up: (up + 1) * gate * sigmoid(CLAMP_SLOPE * gate),
    with both limited, times the weights."""
    result: Tensor = _Clamped.apply(h_NG, weights_N, sigmoid)
    return result


class _Clamped(torch.autograd.Function):
    """Autograd of `clamped_mul`; backward recomputes from the inputs."""

    @staticmethod
    def forward(
        ctx: Any, h_NG: Tensor, weights_N: Tensor | None, sigmoid: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(h_NG, weights_N)
        gate, up = _limited(h_NG)
        a_NM = (up + 1) * (gate * sigmoid(gate * CLAMP_SLOPE))
        return weighted(a_NM, weights_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        h_NG, weights_N = ctx.saved_tensors
        gate, up = _limited(h_NG)
        s_NM = (gate * CLAMP_SLOPE).sigmoid_()
        glu_NM, up = gate.mul_(s_NM), up.add_(1)
        d_NM, dweights_N = grads[0], None
        if weights_N is not None:
            if ctx.needs_input_grad[1]:
                dweights_N = (d_NM * glu_NM).mul_(up).sum(-1, dtype=weights_N.dtype)
            d_NM = d_NM.clone().mul_(weights_N[:, None])
        dup_NM = (d_NM * glu_NM).masked_fill_(h_NG[:, 1::2].abs() > CLAMP_LIMIT, 0)
        # The derivative of g * sigmoid(c g) is s + c g s (1 - s).
        s_NM.addcmul_(glu_NM.mul_(CLAMP_SLOPE), 1 - s_NM)
        dgate_NM = up.mul_(s_NM).mul_(d_NM).masked_fill_(h_NG[:, ::2] > CLAMP_LIMIT, 0)
        return torch.stack([dgate_NM, dup_NM], dim=-1).flatten(-2), dweights_N, None


def _limited(h_NG: Tensor) -> tuple[Tensor, Tensor]:
    """Splits interleaved gate and up and clamps them to their limits."""
    return h_NG[:, ::2].clamp(max=CLAMP_LIMIT), h_NG[:, 1::2].clamp(-CLAMP_LIMIT, CLAMP_LIMIT)


def weighted_silu_mul(h_NG: Tensor, weights_N: Tensor | None) -> Tensor:
    """weight * silu(gate) * up, for experts. Gradients flow to the weights."""
    result: Tensor
    if has_kernel(h_NG):
        result = kernel_silu_mul(h_NG, weights_N)
    else:
        result = _Gated.apply(h_NG, weights_N)
    return result


class _Gated(torch.autograd.Function):
    """Autograd of `weighted_silu_mul`; backward recomputes from the inputs."""

    @staticmethod
    def forward(ctx: Any, h_NG: Tensor, weights_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(h_NG, weights_N)
        gate, up = h_NG.chunk(2, dim=-1)
        # Not in place: selective recomputation under torch.compile does not support it.
        return weighted(F.silu(gate) * up, weights_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        h_NG, weights_N = ctx.saved_tensors
        gate, up = h_NG.chunk(2, dim=-1)
        s_NM = gate.sigmoid()
        silu_NM = gate * s_NM
        d_NM, dweights_N = grads[0], None
        if weights_N is not None:
            if ctx.needs_input_grad[1]:
                terms = d_NM * silu_NM * up
                dweights_N = terms.sum(-1, dtype=weights_N.dtype)
            d_NM = d_NM.clone().mul_(weights_N[:, None])
        # silu'(g) = s * (1 + g - g * s)
        slope_NM = (1 + gate - silu_NM).mul_(s_NM)
        return torch.cat([slope_NM.mul_(up).mul_(d_NM), silu_NM.mul_(d_NM)], dim=-1), dweights_N
