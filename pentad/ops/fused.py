"""Small operations between the matrix products of a decoder, each one Triton kernel, forward only.

Each rounds where the plain torch lines of the model round, so a fused model differs from the
plain one only by the order of sums. Beside each kernel stands the plain version as its reference.

Shape letters: T tokens, D width, H query heads, K key-value heads, d head width, F ffn width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


def reference_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    wide = x_TD.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * wide.to(x_TD.dtype)


def norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """RMS norm of contiguous rows."""
    width = x_TD.shape[-1]
    assert x_TD.is_contiguous() and weight_D.dtype == x_TD.dtype
    out_TD = torch.empty_like(x_TD)
    _norm[(x_TD.numel() // width,)](
        x_TD, weight_D, out_TD, eps, WIDTH=width, WIDE=triton.next_power_of_2(width), num_warps=4
    )
    return out_TD


@triton.jit
def _norm(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDE)
    mask = d < WIDTH
    x = tl.load(x_ptr + row * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = (x * scale).to(out_ptr.dtype.element_ty)
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0)
    tl.store(out_ptr + row * WIDTH + d, y * weight, mask=mask)


def reference_rotate(
    x_THd: Tensor, weight_d: Tensor | None, cos_Td: Tensor, sin_Td: Tensor, eps: float
) -> Tensor:
    if weight_d is not None:
        x_THd = reference_norm(x_THd, weight_d, eps)
    first, second = x_THd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_THd * cos_Td[:, None] + turned * sin_Td[:, None]


def norm_rotate(
    q_THd: Tensor,
    k_TKd: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_Td: Tensor,
    sin_Td: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Head norms (where weights are given) and rotary of queries and keys, in one kernel."""
    num_tokens, num_heads, head_dim = q_THd.shape
    num_kv_heads = k_TKd.shape[1]
    assert q_THd.is_contiguous() and k_TKd.is_contiguous()
    assert cos_Td.is_contiguous() and sin_Td.is_contiguous() and head_dim % 2 == 0
    q_out, k_out = torch.empty_like(q_THd), torch.empty_like(k_TKd)
    has_norm = q_weight is not None and k_weight is not None
    _norm_rotate[(num_tokens, num_heads + num_kv_heads)](
        q_THd,
        k_TKd,
        q_weight if has_norm else q_THd,
        k_weight if has_norm else k_TKd,
        cos_Td,
        sin_Td,
        q_out,
        k_out,
        eps,
        HAS_NORM=has_norm,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        WIDE=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )
    return q_out, k_out


@triton.jit
def _norm_rotate(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    k_out_ptr: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if head < NUM_HEADS:
        at = (token * NUM_HEADS + head) * 2 * HALF
        _rotate_head(q_ptr + at, q_weight_ptr, cos_ptr, sin_ptr, q_out_ptr + at, token, eps,
                     HAS_NORM, HALF, WIDE)  # fmt: skip
    else:
        at = (token * NUM_KV_HEADS + head - NUM_HEADS) * 2 * HALF
        _rotate_head(k_ptr + at, k_weight_ptr, cos_ptr, sin_ptr, k_out_ptr + at, token, eps,
                     HAS_NORM, HALF, WIDE)  # fmt: skip


@triton.jit
def _rotate_head(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    d = tl.arange(0, WIDE)
    mask = d < HALF
    first = tl.load(x_ptr + d, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + HALF + d, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        total = tl.sum(first * first, 0) + tl.sum(second * second, 0)
        scale = tl.rsqrt(total / (2 * HALF) + eps)
        weight_1 = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32)
        weight_2 = tl.load(weight_ptr + HALF + d, mask=mask, other=0.0).to(tl.float32)
        first = ((first * scale).to(dtype).to(tl.float32) * weight_1).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * weight_2).to(dtype).to(tl.float32)
    at = token * 2 * HALF + d
    cos_1 = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    # Both products are rounded before they are added, as in the plain version.
    out_1 = (first * cos_1).to(dtype).to(tl.float32) - (second * sin_1).to(dtype).to(tl.float32)
    out_2 = (second * cos_2).to(dtype).to(tl.float32) + (first * sin_2).to(dtype).to(tl.float32)
    tl.store(out_ptr + d, out_1.to(dtype), mask=mask)
    tl.store(out_ptr + HALF + d, out_2.to(dtype), mask=mask)


def reference_silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    return F.silu(gate_TF) * up_TF


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """Both may be halves of one tensor: rows are contiguous, their distance is free."""
    num_tokens, width = gate_TF.shape
    assert gate_TF.stride() == up_TF.stride() and gate_TF.stride(1) == 1
    out_TF = torch.empty((num_tokens, width), dtype=gate_TF.dtype, device=gate_TF.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_mul[(num_tokens, triton.cdiv(width, block))](
        gate_TF, up_TF, out_TF, gate_TF.stride(0), WIDTH=width, BLOCK=block, num_warps=4
    )
    return out_TF


@triton.jit
def _silu_mul(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = f < WIDTH
    gate = tl.load(gate_ptr + row * stride + f, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride + f, mask=mask, other=0.0)
    out = (gate / (1.0 + tl.exp(-gate))).to(up.dtype) * up
    tl.store(out_ptr + row * WIDTH + f, out, mask=mask)


def reference_store(
    k_NKd: Tensor, v_NKd: Tensor, places_T: Tensor, k_TKd: Tensor, v_TKd: Tensor
) -> None:
    k_NKd.index_copy_(0, places_T, k_TKd)
    v_NKd.index_copy_(0, places_T, v_TKd)


def store(k_NKd: Tensor, v_NKd: Tensor, places_T: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> None:
    """Writes keys and values of T tokens to their places among N, in one kernel."""
    width = k_TKd.shape[1] * k_TKd.shape[2]
    assert k_NKd.is_contiguous() and v_NKd.is_contiguous()
    assert k_TKd.is_contiguous() and v_TKd.is_contiguous()
    _store[(k_TKd.shape[0],)](
        k_NKd,
        v_NKd,
        places_T,
        k_TKd,
        v_TKd,
        WIDTH=width,
        WIDE=triton.next_power_of_2(width),
        num_warps=4,
    )


@triton.jit
def _store(
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    places_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + token).to(tl.int64)
    d = tl.arange(0, WIDE)
    mask = d < WIDTH
    k = tl.load(k_ptr + token * WIDTH + d, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * WIDTH + d, mask=mask, other=0.0)
    tl.store(k_cache_ptr + place * WIDTH + d, k, mask=mask)
    tl.store(v_cache_ptr + place * WIDTH + d, v, mask=mask)
