"""Forward-only Triton kernels that fuse the small operations between a decoder's matrix products.

Each kernel rounds where the eager model rounds, so a fused model differs from it only by the order
of sums. The torch reference of each kernel is next to it.

Shape letters: T tokens, D width, H query heads, K key-value heads, d head width, F ffn width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pentad.ops.pages import Pages


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


def reference_add_norm(
    x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    x_TD = x_TD + y_TD
    return x_TD, reference_norm(x_TD, weight_D, eps)


def add_norm(x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add and RMS norm in one kernel: returns the sum and its norm."""
    width = x_TD.shape[-1]
    assert x_TD.is_contiguous() and y_TD.is_contiguous() and weight_D.dtype == x_TD.dtype
    sum_TD, out_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    _add_norm[(x_TD.numel() // width,)](
        x_TD,
        y_TD,
        weight_D,
        sum_TD,
        out_TD,
        eps,
        WIDTH=width,
        WIDE=triton.next_power_of_2(width),
        num_warps=4,
    )
    return sum_TD, out_TD


@triton.jit
def _add_norm(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDE)
    mask = d < WIDTH
    x = tl.load(x_ptr + row * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * WIDTH + d, mask=mask, other=0.0).to(tl.float32)
    total = (x + y).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + row * WIDTH + d, total, mask=mask)
    x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0)
    out = (x * scale).to(out_ptr.dtype.element_ty) * weight
    tl.store(out_ptr + row * WIDTH + d, out, mask=mask)


def reference_rotate(
    x_THd: Tensor, weight_d: Tensor | None, cos_Td: Tensor, sin_Td: Tensor, eps: float
) -> Tensor:
    if weight_d is not None:
        x_THd = reference_norm(x_THd, weight_d, eps)
    first, second = x_THd.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_THd * cos_Td[:, None] + turned * sin_Td[:, None]


HEADS = 8
"""Heads per program."""


def norm_rotate(
    q_THd: Tensor,
    k_TKd: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_Td: Tensor,
    sin_Td: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """QK norm (if weights are given) and rotary embedding of queries and keys in one kernel. Both
    may be views of one tensor: heads of a token are contiguous, the token stride is free."""
    num_tokens, num_heads, head_dim = q_THd.shape
    num_kv_heads = k_TKd.shape[1]
    assert has_dense_rows(q_THd) and has_dense_rows(k_TKd)
    assert cos_Td.is_contiguous() and sin_Td.is_contiguous() and head_dim % 2 == 0
    q_out = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
    k_out = torch.empty(k_TKd.shape, dtype=k_TKd.dtype, device=k_TKd.device)
    has_norm = q_weight is not None and k_weight is not None
    _norm_rotate[(num_tokens, triton.cdiv(num_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS))](
        q_THd,
        k_TKd,
        q_weight if has_norm else q_THd,
        k_weight if has_norm else k_TKd,
        cos_Td,
        sin_Td,
        q_out,
        k_out,
        q_THd.stride(0),
        k_TKd.stride(0),
        eps,
        HAS_NORM=has_norm,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        WIDE=triton.next_power_of_2(head_dim // 2),
        HEADS=HEADS,
        num_warps=2,
    )
    return q_out, k_out


def has_dense_rows(x_Tnd: Tensor) -> bool:
    return x_Tnd.stride(2) == 1 and x_Tnd.stride(1) == x_Tnd.shape[2]


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
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    if part < q_parts:
        _rotate_heads(
            q_ptr + token * q_stride, q_weight_ptr, cos_ptr, sin_ptr,
            q_out_ptr + token * NUM_HEADS * 2 * HALF, token, part * HEADS, eps,
            HAS_NORM, NUM_HEADS, HALF, WIDE, HEADS)  # fmt: skip
    else:
        _rotate_heads(
            k_ptr + token * k_stride, k_weight_ptr, cos_ptr, sin_ptr,
            k_out_ptr + token * NUM_KV_HEADS * 2 * HALF, token, (part - q_parts) * HEADS, eps,
            HAS_NORM, NUM_KV_HEADS, HALF, WIDE, HEADS)  # fmt: skip


@triton.jit
def _rotate_heads(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token: tl.tensor,
    first_head: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    NUM: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    d = tl.arange(0, WIDE)
    head = first_head + tl.arange(0, HEADS)
    mask = d < HALF
    mask_hd = (head < NUM)[:, None] & mask[None, :]
    x_at = head[:, None] * 2 * HALF + d[None, :]
    first = tl.load(x_ptr + x_at, mask=mask_hd, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + x_at + HALF, mask=mask_hd, other=0.0).to(tl.float32)
    if HAS_NORM:
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(total / (2 * HALF) + eps)[:, None]
        weight_1 = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32)[None, :]
        weight_2 = tl.load(weight_ptr + HALF + d, mask=mask, other=0.0).to(tl.float32)[None, :]
        first = ((first * scale).to(dtype).to(tl.float32) * weight_1).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * weight_2).to(dtype).to(tl.float32)
    at = token * 2 * HALF + d
    cos_1 = tl.load(cos_ptr + at, mask=mask, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)[None, :]
    # Both products are rounded before the addition, as in the torch version.
    out_1 = (first * cos_1).to(dtype).to(tl.float32) - (second * sin_1).to(dtype).to(tl.float32)
    out_2 = (second * cos_2).to(dtype).to(tl.float32) + (first * sin_2).to(dtype).to(tl.float32)
    tl.store(out_ptr + x_at, out_1.to(dtype), mask=mask_hd)
    tl.store(out_ptr + x_at + HALF, out_2.to(dtype), mask=mask_hd)


def reference_silu_mul(gate_TF: Tensor, up_TF: Tensor, weights_T: Tensor | None = None) -> Tensor:
    out_TF = F.silu(gate_TF) * up_TF
    return out_TF if weights_T is None else (out_TF * weights_T[:, None]).to(out_TF.dtype)


def silu_mul(gate_TF: Tensor, up_TF: Tensor, weights_T: Tensor | None = None) -> Tensor:
    """silu(gate) * up, each row times its weight if given. Both may be halves of one tensor: rows
    are contiguous, their stride is free."""
    num_tokens, width = gate_TF.shape
    assert gate_TF.stride() == up_TF.stride() and gate_TF.stride(1) == 1
    assert weights_T is None or weights_T.is_contiguous()
    out_TF = torch.empty((num_tokens, width), dtype=gate_TF.dtype, device=gate_TF.device)
    block = min(1024, triton.next_power_of_2(width))
    num_programs = num_tokens * triton.cdiv(width, block)
    if num_programs:
        _silu_mul[(num_programs,)](
            gate_TF,
            up_TF,
            gate_TF if weights_T is None else weights_T,
            out_TF,
            gate_TF.stride(0),
            HAS_WEIGHTS=weights_T is not None,
            WIDTH=width,
            BLOCK=block,
            num_warps=4,
        )
    return out_TF


@triton.jit
def _silu_mul(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    HAS_WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    parts: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // parts).to(tl.int64)
    f = (tl.program_id(0) % parts) * BLOCK + tl.arange(0, BLOCK)
    mask = f < WIDTH
    gate = tl.load(gate_ptr + row * stride + f, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride + f, mask=mask, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out = (silu * up).to(dtype)
    if HAS_WEIGHTS:
        out = (out.to(tl.float32) * tl.load(weights_ptr + row).to(tl.float32)).to(dtype)
    tl.store(out_ptr + row * WIDTH + f, out, mask=mask)


def store(pages: Pages, places_T: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> None:
    """`Pages.write` as one kernel. Heads of a token are contiguous, the stride between tokens is
    free."""
    if pages.is_latent:  # one key head, no values
        pages.write(places_T, k_TKd, v_TKd)
        return
    num_heads, width = k_TKd.shape[1:]
    assert pages.k_BbKd.is_contiguous() and pages.v_BbKd.is_contiguous()
    assert has_dense_rows(k_TKd) and has_dense_rows(v_TKd)
    _store[(k_TKd.shape[0],)](
        pages.k_BbKd,
        pages.v_BbKd,
        pages.k_scale_BbK,
        pages.v_scale_BbK,
        places_T,
        k_TKd,
        v_TKd,
        k_TKd.stride(0),
        v_TKd.stride(0),
        NUM_HEADS=num_heads,
        WIDTH=width,
        WIDE_HEADS=triton.next_power_of_2(num_heads),
        WIDE=triton.next_power_of_2(width),
        LARGEST=pages.largest,
        ROUNDS=pages.k_BbKd.dtype == torch.int8,
        num_warps=4,
    )


@triton.jit
def _store(
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    places_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE_HEADS: tl.constexpr,
    WIDE: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + token).to(tl.int64)
    head = tl.arange(0, WIDE_HEADS)
    d = tl.arange(0, WIDE)
    mask = (head < NUM_HEADS)[:, None] & (d < WIDTH)[None, :]
    at = head[:, None] * WIDTH + d[None, :]
    k = tl.load(k_ptr + token * k_stride + at, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_stride + at, mask=mask, other=0.0)
    if LARGEST is not None:
        k, k_scale = _quantise(k, LARGEST, ROUNDS)
        v, v_scale = _quantise(v, LARGEST, ROUNDS)
        tl.store(k_scale_ptr + place * NUM_HEADS + head, k_scale, mask=head < NUM_HEADS)
        tl.store(v_scale_ptr + place * NUM_HEADS + head, v_scale, mask=head < NUM_HEADS)
    to = place * NUM_HEADS * WIDTH + at
    tl.store(k_cache_ptr + to, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + to, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _quantise(
    x: tl.tensor, LARGEST: tl.constexpr, ROUNDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    wide = x.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    scale = tl.where(largest == 0, 1.0, largest * (1.0 / LARGEST))
    scale += tl.sum(0.0 * wide, 1)  # nan for rows with non-finite numbers: a maximum ignores nan
    scaled = tl.div_rn(wide, tl.broadcast_to(scale[:, None], wide.shape))
    if ROUNDS:  # adding 1.5 * 2**23 rounds to an integer
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled, scale
