"""Triton kernels for attention over short packed sequences: one program computes a sequence and a
key-value head, whose scores are one tile.

Flash kernels process tiles of 128 queries and keys, keep the log-sum-exp, and sum the gradients of
queries in a padded float32 array; for sequences of fewer tokens most of that is padding. Here the
scores are computed again in backward and nothing is kept. Everything between the products is
computed in float32, and there are no atomics: results are bitwise repeatable.

These are custom ops, not autograd functions: see `ops.gated_kernel`.

Shapes: T tokens of all sequences, H query heads, K key-value heads, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_TILE = 16
"""Smallest side of a matrix product of the hardware."""


@torch.library.custom_op(
    "pentad::short_attend",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor bounds, int max_length, int window) -> Tensor",
)
def short_attend(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, max_length: int, window: int
) -> Tensor:
    """Causal attention of q_THd over k_TKd and v_TKd. `bounds`: first token of each sequence and
    the number of all; `max_length`: bound of the lengths; `window` 0: no limit."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    grid, sizes = _plan(q, k, bounds, max_length)
    _forward[grid](q, k, v, out, bounds, q.shape[-1] ** -0.5, window, **sizes)
    return out


@short_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, max_length: int, window: int) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op(
    "pentad::short_attend_gradients",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor bounds, int max_length, int window)"
    " -> (Tensor, Tensor, Tensor)",
)
def short_attend_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    max_length: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v = grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grid, sizes = _plan(q, k, bounds, max_length)
    _backward[grid](
        *(grad, q, k, v, dq, dk, dv, bounds, q.shape[-1] ** -0.5, window),
        **sizes,
    )
    return dq, dk, dv


@short_attend_gradients.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    max_length: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, bounds, ctx.max_length, ctx.window = inputs
    ctx.save_for_backward(q, k, v, bounds)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = short_attend_gradients(grad, *ctx.saved_tensors, ctx.max_length, ctx.window)
    return (*gradients, None, None, None)


short_attend.register_autograd(_differentiate, setup_context=_keep)


def _plan(
    q: Tensor, k: Tensor, bounds: Tensor, max_length: int
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and the sizes for which the kernels are compiled."""
    num_heads, width = q.shape[1:]
    num_kv_heads = k.shape[1]
    tile = max(MIN_TILE, triton.next_power_of_2(max_length))
    sizes = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "WIDTH": width,
        "WIDE": max(MIN_TILE, triton.next_power_of_2(width)),
        "TILE": tile,
        "HALF": max(MIN_TILE, tile // 2),
        "num_warps": 8 if tile > 64 else 4,
    }
    return (len(bounds) - 1, num_kv_heads), sizes


@triton.jit
def _load(
    ptr: tl.tensor,
    rows: tl.tensor,
    head: tl.tensor,
    length: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Rows of one head of a sequence that begins at the pointer."""
    d = tl.arange(0, WIDE)
    mask = (rows < length)[:, None] & (d < WIDTH)[None, :]
    return tl.load(ptr + (rows[:, None] * HEADS + head) * WIDTH + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(
    ptr: tl.tensor,
    x: tl.tensor,
    rows: tl.tensor,
    head: tl.tensor,
    length: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    d = tl.arange(0, WIDE)
    mask = (rows < length)[:, None] & (d < WIDTH)[None, :]
    at = ptr + (rows[:, None] * HEADS + head) * WIDTH + d[None, :]
    tl.store(at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _probabilities(
    q: tl.tensor,
    k: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
) -> tl.tensor:
    """Softmax of the scores in float32. Rows beyond the sequence have zero queries, and finite
    probabilities that nothing reads."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    distance = rows[:, None] - rows[None, :]
    sees = (distance >= 0) & ((window == 0) | (distance < window))
    scores = tl.where(sees, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _forward_tile(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    length: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    rows = tl.arange(0, TILE)
    k = _load(k_ptr, rows, kv_head, length, NUM_KV_HEADS, WIDTH, WIDE)
    v = _load(v_ptr, rows, kv_head, length, NUM_KV_HEADS, WIDTH, WIDE)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    for i in range(group):
        head = kv_head * group + i
        q = _load(q_ptr, rows, head, length, NUM_HEADS, WIDTH, WIDE)
        p = _probabilities(q, k, rows, length, scale, window)
        out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        _store(out_ptr, out, rows, head, length, NUM_HEADS, WIDTH, WIDE)


@triton.jit
def _forward(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    begin = tl.load(bounds_ptr + tl.program_id(0)).to(tl.int64)
    length = tl.load(bounds_ptr + tl.program_id(0) + 1).to(tl.int64) - begin
    kv_head = tl.program_id(1)
    q_ptr += begin * NUM_HEADS * WIDTH
    out_ptr += begin * NUM_HEADS * WIDTH
    k_ptr += begin * NUM_KV_HEADS * WIDTH
    v_ptr += begin * NUM_KV_HEADS * WIDTH
    if length <= HALF:
        _forward_tile(
            q_ptr, k_ptr, v_ptr, out_ptr, length, kv_head, scale, window,
            NUM_HEADS, NUM_KV_HEADS, WIDTH, WIDE, HALF)  # fmt: skip
    else:
        _forward_tile(
            q_ptr, k_ptr, v_ptr, out_ptr, length, kv_head, scale, window,
            NUM_HEADS, NUM_KV_HEADS, WIDTH, WIDE, TILE)  # fmt: skip


@triton.jit
def _backward_tile(
    grad_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    length: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    rows = tl.arange(0, TILE)
    k = _load(k_ptr, rows, kv_head, length, NUM_KV_HEADS, WIDTH, WIDE)
    v = _load(v_ptr, rows, kv_head, length, NUM_KV_HEADS, WIDTH, WIDE)
    dk = tl.zeros([TILE, WIDE], dtype=tl.float32)
    dv = tl.zeros([TILE, WIDE], dtype=tl.float32)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    for i in range(group):
        head = kv_head * group + i
        q = _load(q_ptr, rows, head, length, NUM_HEADS, WIDTH, WIDE)
        grad = _load(grad_ptr, rows, head, length, NUM_HEADS, WIDTH, WIDE)
        p = _probabilities(q, k, rows, length, scale, window)
        dv += tl.dot(tl.trans(p.to(v.dtype)), grad, input_precision="ieee")
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
        ds = ds.to(q.dtype)
        dq = tl.dot(ds, k, input_precision="ieee")
        _store(dq_ptr, dq, rows, head, length, NUM_HEADS, WIDTH, WIDE)
        dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
    _store(dk_ptr, dk, rows, kv_head, length, NUM_KV_HEADS, WIDTH, WIDE)
    _store(dv_ptr, dv, rows, kv_head, length, NUM_KV_HEADS, WIDTH, WIDE)


@triton.jit
def _backward(
    grad_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    dq_ptr: tl.tensor,
    dk_ptr: tl.tensor,
    dv_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    begin = tl.load(bounds_ptr + tl.program_id(0)).to(tl.int64)
    length = tl.load(bounds_ptr + tl.program_id(0) + 1).to(tl.int64) - begin
    kv_head = tl.program_id(1)
    queries, keys = begin * NUM_HEADS * WIDTH, begin * NUM_KV_HEADS * WIDTH
    if length <= HALF:
        _backward_tile(
            grad_ptr + queries, q_ptr + queries, k_ptr + keys, v_ptr + keys,
            dq_ptr + queries, dk_ptr + keys, dv_ptr + keys, length, kv_head, scale, window,
            NUM_HEADS, NUM_KV_HEADS, WIDTH, WIDE, HALF)  # fmt: skip
    else:
        _backward_tile(
            grad_ptr + queries, q_ptr + queries, k_ptr + keys, v_ptr + keys,
            dq_ptr + queries, dk_ptr + keys, dv_ptr + keys, length, kv_head, scale, window,
            NUM_HEADS, NUM_KV_HEADS, WIDTH, WIDE, TILE)  # fmt: skip
