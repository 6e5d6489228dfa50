"""Attention of one new token per sequence over a paged key-value cache: Triton kernel, reference.

Shape letters: S sequences, H query heads, K key-value heads, d head width, B blocks of b places.

One program takes one sequence and one key-value head, so keys and values are read once for all
query heads that share them. Where there are few programs the places of a sequence are split
among several, and a second kernel merges them. Lengths, block table and its width are read from
device memory: a captured graph follows them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.ops.spans import NO_WINDOW

PLACES = 64
"""Places a program loads at a time."""
NUM_WARPS, NUM_STAGES = 4, 2
"""Two stages: their memory lets three programs share a multiprocessor."""
MIN_PROGRAMS = 512
"""Splits are added until there are about this many programs: a few on every multiprocessor."""
MAX_SPLITS = 16
MIN_DOT = 16
"""Smallest side of a tensor-core tile."""


def reference_decode(
    q_SHd: Tensor,
    k_BbKd: Tensor,
    v_BbKd: Tensor,
    blocks_SB: Tensor,
    lengths_S: Tensor,
    window: int | None = None,
) -> Tensor:
    """What the kernel computes, sequence by sequence."""
    group = q_SHd.shape[1] // k_BbKd.shape[2]
    out = torch.empty_like(q_SHd)
    for s, length in enumerate(lengths_S.tolist()):
        blocks = blocks_SB[s, : -(-length // k_BbKd.shape[1])].long()
        first = 0 if window is None else max(0, length - window)
        k, v = (
            x[blocks].flatten(0, 1)[first:length].repeat_interleave(group, 1).float()
            for x in (k_BbKd, v_BbKd)
        )
        scores = torch.einsum("hd,phd->hp", q_SHd[s].float(), k) * q_SHd.shape[-1] ** -0.5
        out[s] = torch.einsum("hp,phd->hd", scores.softmax(-1), v).to(q_SHd.dtype)
    return out


def paged_decode(
    q_SHd: Tensor,
    k_BbKd: Tensor,
    v_BbKd: Tensor,
    blocks: Tensor,
    width: Tensor,
    lengths_S: Tensor,
    window: int | None = None,
) -> Tensor:
    """Row s of the table is `blocks[s * width : (s + 1) * width]`; `width` has one element."""
    num_seqs, num_heads, head_dim = q_SHd.shape
    block_size, num_kv_heads = k_BbKd.shape[1:3]
    assert q_SHd.is_contiguous() and k_BbKd.is_contiguous() and v_BbKd.is_contiguous()
    splits = num_splits(num_seqs * num_kv_heads)
    out_SHd = torch.empty_like(q_SHd)
    shape = (num_seqs, num_heads, splits)
    # With one split nothing is written to them.
    part_acc = torch.empty((*shape, head_dim), dtype=torch.float32, device=q_SHd.device)
    part_max = torch.empty(shape, dtype=torch.float32, device=q_SHd.device)
    part_sum = torch.empty(shape, dtype=torch.float32, device=q_SHd.device)
    _attend[(num_seqs, num_kv_heads, splits)](
        q_SHd,
        k_BbKd,
        v_BbKd,
        out_SHd,
        part_acc,
        part_max,
        part_sum,
        blocks,
        width,
        lengths_S,
        head_dim**-0.5,
        NO_WINDOW if window is None else window,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        WIDE_DIM=max(MIN_DOT, triton.next_power_of_2(head_dim)),
        WIDE_GROUP=max(MIN_DOT, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_SIZE=block_size,
        PLACES=PLACES,
        SPLITS=splits,
        PRECISION="ieee" if q_SHd.dtype == torch.float32 else "tf32",
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    if splits > 1:
        _merge[(num_seqs, num_heads)](
            out_SHd,
            part_acc,
            part_max,
            part_sum,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            WIDE_DIM=triton.next_power_of_2(head_dim),
            SPLITS=splits,
            num_warps=1,
        )
    return out_SHd


def num_splits(num_programs: int) -> int:
    """A power of two that fills the device."""
    wanted = -(-MIN_PROGRAMS // num_programs)
    return min(MAX_SPLITS, triton.next_power_of_2(wanted))


@triton.jit
def _attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_acc_ptr: tl.tensor,
    part_max_ptr: tl.tensor,
    part_sum_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    width_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    WIDE_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    length = tl.load(lengths_ptr + row).to(tl.int32)
    width = tl.load(width_ptr).to(tl.int32)

    first = tl.maximum(length - window, 0)
    each = tl.cdiv(tl.cdiv(length - first, SPLITS), PLACES) * PLACES
    start = first + split * each
    end = tl.minimum(start + each, length)

    g = tl.arange(0, WIDE_GROUP)
    d = tl.arange(0, WIDE_DIM)
    head = kv_head * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_at = (row * NUM_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)

    top = tl.full([WIDE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([WIDE_GROUP], tl.float32)
    acc = tl.zeros([WIDE_GROUP, WIDE_DIM], tl.float32)
    for begin in range(start, end, PLACES):
        place = begin + tl.arange(0, PLACES)
        is_in = place < end
        block = tl.load(blocks_ptr + row * width + place // BLOCK_SIZE, mask=is_in, other=0)
        at = (block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        at = at * HEAD_DIM
        mask = is_in[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(is_in[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - new_top)
        weights = tl.exp(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new_top

    if SPLITS == 1:
        out = acc / total[:, None]
        tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        part = (row * NUM_HEADS + head) * SPLITS + split
        tl.store(part_acc_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, mask=q_mask)
        tl.store(part_max_ptr + part, top, mask=g < GROUP)
        tl.store(part_sum_ptr + part, total, mask=g < GROUP)


@triton.jit
def _merge(
    out_ptr: tl.tensor,
    part_acc_ptr: tl.tensor,
    part_max_ptr: tl.tensor,
    part_sum_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * NUM_HEADS + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, WIDE_DIM)
    top = tl.load(part_max_ptr + row * SPLITS + split)
    total = tl.load(part_sum_ptr + row * SPLITS + split)
    # A split without places has top = -inf, so it weighs nothing.
    weight = tl.exp(top - tl.max(top, 0))
    at = (row * SPLITS + split)[:, None] * HEAD_DIM + d[None, :]
    acc = tl.load(part_acc_ptr + at, mask=(d < HEAD_DIM)[None, :], other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out_ptr + row * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
