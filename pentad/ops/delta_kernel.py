"""Triton kernels for delta nets: decoding steps that update the cached states in place, and
inverses of the triangular systems of training.

The torch version (`ops.delta.recall_token`) reads and writes the states of a batch a dozen times.
These kernels read and write each state, and each convolution cache, once.

Shape letters as in `ops.delta`; R rows of the slots, w tokens that a convolution looks back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.core.sizes import DELTA_EPS

VALUES = 32
"""Columns of a state in one program."""
CHANNELS = 1024


def convolve_rows(
    held_RwX: Tensor, rows_S: Tensor, begins_S: Tensor, x_SX: Tensor, weight_XW: Tensor
) -> Tensor:
    """Convolution step for one token per sequence; updates the slots to the newest w tokens."""
    num, channels = x_SX.shape
    assert held_RwX.is_contiguous() and x_SX.is_contiguous() and weight_XW.is_contiguous()
    out_SX = torch.empty_like(x_SX)
    _convolve[(num, triton.cdiv(channels, CHANNELS))](
        held_RwX,
        rows_S,
        begins_S,
        x_SX,
        weight_XW,
        out_SX,
        NUM_CHANNELS=channels,
        BACK=held_RwX.shape[1],
        WIDE=CHANNELS,
        num_warps=4,
    )
    return out_SX


def recall_rows(
    held_RHkv: Tensor,
    rows_S: Tensor,
    begins_S: Tensor,
    q_SHk: Tensor,
    k_SHk: Tensor,
    v_SHv: Tensor,
    g_SH: Tensor,
    b_SH: Tensor,
) -> Tensor:
    """Delta rule for one token per sequence; updates the states in the slots."""
    num, heads, values = v_SHv.shape
    key_heads, keys = k_SHk.shape[1:]
    assert held_RHkv.is_contiguous() and g_SH.is_contiguous() and b_SH.is_contiguous()
    parts = [x if has_dense_heads(x) else x.contiguous() for x in (q_SHk, k_SHk, v_SHv)]
    out_SHv = torch.empty(v_SHv.shape, dtype=q_SHk.dtype, device=v_SHv.device)
    columns = min(VALUES, triton.next_power_of_2(values))
    _recall[(num, heads, triton.cdiv(values, columns))](
        held_RHkv,
        rows_S,
        begins_S,
        *parts,
        g_SH,
        b_SH,
        out_SHv,
        *(x.stride(0) for x in parts),
        keys**-0.5,
        DELTA_EPS,
        HEADS=heads,
        KEY_HEADS=key_heads,
        KEYS=keys,
        VALUES=values,
        WIDE_KEYS=triton.next_power_of_2(keys),
        COLUMNS=columns,
        num_warps=4,
    )
    return out_SHv


def invert(system: Tensor) -> Tensor:
    """Inverses of unit lower-triangular matrices; the diagonal and the upper triangle are not
    read."""
    size = system.shape[-1]
    system = system.contiguous()
    found = torch.empty_like(system)
    _invert[(system[..., 0, 0].numel(),)](
        system, found, SIZE=size, WIDE=triton.next_power_of_2(size), num_warps=4
    )
    return found


def has_dense_heads(x_SHk: Tensor) -> bool:
    """Whether the heads of a token are contiguous; the stride between tokens is free."""
    return x_SHk.stride(2) == 1 and x_SHk.stride(1) == x_SHk.shape[2]


@triton.jit
def _convolve(
    held_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    NUM_CHANNELS: tl.constexpr,
    BACK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    s = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    is_in = channel < NUM_CHANNELS
    row = tl.load(rows_ptr + s).to(tl.int64)
    begins = tl.load(begins_ptr + s)
    x = tl.load(x_ptr + s * NUM_CHANNELS + channel, mask=is_in, other=0.0)
    weight_at = weight_ptr + channel * (BACK + 1)
    total = x.to(tl.float32) * tl.load(weight_at + BACK, mask=is_in, other=0.0).to(tl.float32)
    at = held_ptr + row * BACK * NUM_CHANNELS + channel
    for back in tl.static_range(BACK):
        seen = tl.load(at + back * NUM_CHANNELS, mask=is_in, other=0.0)
        seen = tl.where(begins, 0.0, seen)
        weight = tl.load(weight_at + back, mask=is_in, other=0.0)
        total += seen.to(tl.float32) * weight.to(tl.float32)
        if back > 0:
            tl.store(at + (back - 1) * NUM_CHANNELS, seen, mask=is_in)
    if BACK > 0:
        tl.store(at + (BACK - 1) * NUM_CHANNELS, x.to(held_ptr.dtype.element_ty), mask=is_in)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + s * NUM_CHANNELS + channel, out, mask=is_in)


@triton.jit
def _recall(
    held_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    begins_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    g_ptr: tl.tensor,
    b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WIDE_KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    s = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    i = tl.arange(0, WIDE_KEYS)
    j = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    i_mask = i < KEYS
    j_mask = j < VALUES
    row = tl.load(rows_ptr + s).to(tl.int64)
    begins = tl.load(begins_ptr + s)
    key_at = key_head * KEYS + i
    q = tl.load(q_ptr + s * q_stride + key_at, mask=i_mask, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + s * k_stride + key_at, mask=i_mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + s * v_stride + head * VALUES + j, mask=j_mask, other=0.0).to(tl.float32)
    q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + eps))
    k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + eps))
    g = tl.load(g_ptr + s * HEADS + head).to(tl.float32)
    b = tl.load(b_ptr + s * HEADS + head).to(tl.float32)
    at = (row * HEADS + head) * KEYS * VALUES
    state_at = held_ptr + at + i[:, None] * VALUES + j[None, :]
    mask = i_mask[:, None] & j_mask[None, :]
    state = tl.where(begins, 0.0, tl.load(state_at, mask=mask, other=0.0)) * tl.exp(g)
    change = (v - tl.sum(state * k[:, None], 0)) * b
    state += k[:, None] * change[None, :]
    tl.store(state_at, state, mask=mask)
    out = tl.sum(state * q[:, None], 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (s * HEADS + head) * VALUES + j, out, mask=j_mask)


@triton.jit
def _invert(
    system_ptr: tl.tensor, found_ptr: tl.tensor, SIZE: tl.constexpr, WIDE: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * SIZE * SIZE
    i = tl.arange(0, WIDE)
    found = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, SIZE):
        mask = i < row
        held = tl.load(system_ptr + at + row * SIZE + i, mask=mask, other=0.0).to(tl.float32)
        change = tl.sum(held[:, None] * found, 0)
        found = tl.where((i == row)[:, None], found - change[None, :], found)
    mask = (i < SIZE)[:, None] & (i < SIZE)[None, :]
    found_at = found_ptr + at + i[:, None] * SIZE + i[None, :]
    tl.store(found_at, found.to(found_ptr.dtype.element_ty), mask=mask)
