"""Triton kernels of `invariant`: each has one fixed tile size for every batch.

Every element of a result is computed by the same instructions in the same order: sums run over
blocks of one size in ascending order inside one program, and no sum is split over programs. The
tile sizes suit both decoding and training.

Shapes: as in `invariant`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.ops import fused
from pentad.ops.paged_decode import limit
from pentad.ops.spans import NO_WINDOW, Spans

BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64
NARROW_K = 32
"""Tile size for fp32, whose tiles need twice the memory."""
ROWS = 64
"""Queries times heads of a tile of attention."""
KEYS = 64
CHUNK = 4096
LOG2_E = 1.4426950408889634


def norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return fused.norm(x, weight_D, eps)  # one program per row


def linear(x_TD: Tensor, weight_OD: Tensor, *, wide: bool = False) -> Tensor:
    return _product(x_TD, weight_OD[None], None, wide)


def grouped_linear(x_ND: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    return _product(x_ND, weight_EOD, ends_E, False)


def _product(x_ND: Tensor, weight_EOD: Tensor, ends_E: Tensor | None, wide: bool) -> Tensor:
    num_rows, width = x_ND.shape
    num_experts, num_out = weight_EOD.shape[:2]
    assert x_ND.is_contiguous() and weight_EOD.is_contiguous()
    assert x_ND.dtype == weight_EOD.dtype, f"{x_ND.dtype} times {weight_EOD.dtype}"
    dtype = torch.float32 if wide else x_ND.dtype
    out_NO = torch.empty((num_rows, num_out), dtype=dtype, device=x_ND.device)
    if num_rows == 0:
        return out_NO
    num_m = triton.cdiv(num_rows, BLOCK_M) + (0 if ends_E is None else num_experts)
    num_n = triton.cdiv(num_out, BLOCK_N)
    is_narrow = x_ND.dtype == torch.float32
    _multiply[(num_m * num_n,)](
        x_ND,
        weight_EOD,
        out_NO,
        x_ND if ends_E is None else ends_E,
        num_rows,
        num_out,
        num_m,
        num_n,
        WIDTH=width,
        NUM_EXPERTS=num_experts,
        WIDE_EXPERTS=triton.next_power_of_2(num_experts),
        IS_GROUPED=ends_E is not None,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=NARROW_K if is_narrow else BLOCK_K,
        num_warps=4,
        num_stages=2 if is_narrow else 4,
    )
    return out_NO


@triton.jit
def _multiply(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    num_m: tl.tensor,
    num_n: tl.tensor,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    WIDE_EXPERTS: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    # Tiles that share rows or columns run close in time, for the L2 cache.
    GROUP: tl.constexpr = 8
    pid = tl.program_id(0)
    per_group = GROUP * num_n
    first_m = pid // per_group * GROUP
    size = tl.minimum(num_m - first_m, GROUP)
    tile_m = first_m + pid % per_group % size
    tile_n = pid % per_group // size
    expert = 0
    first = tile_m * BLOCK_M
    end = num_rows
    if IS_GROUPED:
        e = tl.arange(0, WIDE_EXPERTS)
        is_one = e < NUM_EXPERTS
        ends = tl.load(ends_ptr + e, mask=is_one, other=0)
        starts = tl.load(ends_ptr + e - 1, mask=is_one & (e > 0), other=0)
        tiles = tl.where(is_one, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
        until = tl.cumsum(tiles, 0)
        expert = tl.sum(((until <= tile_m) & is_one).to(tl.int32), 0)
        is_mine = e == expert
        before = tl.sum(tl.where(e < expert, tiles, 0), 0)
        first = tl.sum(tl.where(is_mine, starts, 0), 0) + (tile_m - before) * BLOCK_M
        end = tl.sum(tl.where(is_mine, ends, 0), 0)
    if expert < NUM_EXPERTS:
        m = first + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        is_row, is_column = m < end, n < num_out
        x_at = x_ptr + m.to(tl.int64)[:, None] * WIDTH + k[None, :]
        w_ptr = weight_ptr + tl.full((), expert, tl.int64) * num_out * WIDTH
        w_at = w_ptr + n.to(tl.int64)[None, :] * WIDTH + k[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            is_in = k < WIDTH - start
            x = tl.load(x_at + start, mask=is_row[:, None] & is_in[None, :], other=0.0)
            w = tl.load(w_at + start, mask=is_column[None, :] & is_in[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        at = out_ptr + m.to(tl.int64)[:, None] * num_out + n[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def label_logprobs(logits_TV: Tensor, labels_T: Tensor, scale_T: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, vocab_size = logits_TV.shape
    assert logits_TV.is_contiguous() and logits_TV.dtype == torch.float32
    logprobs_T = torch.empty(num_rows, dtype=torch.float32, device=logits_TV.device)
    entropy_T = torch.empty_like(logprobs_T)
    if num_rows:
        _label_logprobs[(num_rows,)](
            logits_TV, labels_T, scale_T, logprobs_T, entropy_T, vocab_size, CHUNK=CHUNK,
            num_warps=8,
        )  # fmt: skip
    return logprobs_T, entropy_T


@triton.jit
def _label_logprobs(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    vocab_size: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + row)
    label = tl.maximum(tl.load(labels_ptr + row), 0)
    row_ptr = logits_ptr + row * vocab_size
    v = tl.arange(0, CHUNK)
    tops = tl.full((CHUNK,), float("-inf"), dtype=tl.float32)
    for start in range(0, vocab_size, CHUNK):
        is_in = start + v < vocab_size
        x = tl.load(row_ptr + start + v, mask=is_in, other=float("-inf")) * scale
        tops = tl.maximum(tops, x)
    top = tl.max(tops, 0)
    totals = tl.zeros((CHUNK,), dtype=tl.float32)
    means = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in range(0, vocab_size, CHUNK):
        is_in = start + v < vocab_size
        x = tl.load(row_ptr + start + v, mask=is_in, other=0.0) * scale
        weights = tl.where(is_in, tl.exp(x - top), 0.0)
        totals += weights
        means += weights * x
    total = tl.sum(totals, 0)
    lse = top + tl.log(total)
    chosen = tl.load(row_ptr + label) * scale
    tl.store(logprobs_ptr + row, chosen - lse)
    tl.store(entropy_ptr + row, lse - tl.sum(means, 0) / total)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries split into tiles of at most `ROWS` // group tokens; int64 [N] on the device.

    Safe for CUDA graphs: nothing here is read on the host.
    """

    first_N: Tensor
    """Flat index of the first query."""
    start_N: Tensor
    """Position of the first query in its sequence."""
    count_N: Tensor
    row_N: Tensor
    """Row of the table."""
    table: Tensor
    """Flat table with `width` entries per row."""
    width: Tensor
    piece: int
    stride: int


def tiles_of(spans: Spans, group: int, device: torch.device) -> Tiles:
    size = max(1, ROWS // group)
    num_S = -(-spans.count_S // size)
    row_N = np.repeat(np.arange(len(num_S)), num_S)
    offset_N = (np.arange(len(row_N)) - np.repeat(np.cumsum(num_S) - num_S, num_S)) * size
    columns = (
        spans.first_S[row_N] + offset_N,
        spans.start_S[row_N] + offset_N,
        np.minimum(spans.count_S[row_N] - offset_N, size),
        row_N,
    )
    # Longest first: the work of a tile grows with its position.
    order = np.argsort(-columns[1], kind="stable")
    packed = torch.from_numpy(np.stack([column[order] for column in columns]).astype(np.int64))
    first_N, start_N, count_N, row_at_N = packed.to(device).unbind()
    table = torch.from_numpy(spans.table_SW.reshape(-1).astype(np.int32)).to(device)
    width = torch.tensor([spans.table_SW.shape[1]], device=device)
    return Tiles(
        first_N, start_N, count_N, row_at_N, table, width, spans.piece, spans.stride
    )  # fmt: skip


def attend(
    q_THd: Tensor,
    k_PKd: Tensor,
    v_PKd: Tensor,
    tiles: Tiles,
    window: int | None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    num_heads, head_dim = q_THd.shape[1:]
    num_kv = k_PKd.shape[1]
    assert q_THd.is_contiguous() and k_PKd.is_contiguous() and v_PKd.is_contiguous()
    assert num_heads // num_kv <= ROWS, f"{num_heads // num_kv} query heads share one key head"
    out_THd = torch.empty_like(q_THd)
    _attend[(len(tiles.first_N), num_kv)](
        q_THd,
        k_PKd,
        v_PKd,
        out_THd,
        tiles.first_N,
        tiles.start_N,
        tiles.count_N,
        tiles.row_N,
        tiles.table,
        tiles.width,
        q_THd if sinks is None else sinks,
        head_dim**-0.5 * LOG2_E,
        NO_WINDOW if window is None else window,
        (cap or 0.0) * LOG2_E,
        HAS_SINKS=sinks is not None,
        HAS_CAP=cap is not None,
        LOG2_E=LOG2_E,
        PIECE=tiles.piece,
        STRIDE=tiles.stride,
        NUM_KV=num_kv,
        GROUP=num_heads // num_kv,
        HEAD_DIM=head_dim,
        WIDE=max(16, triton.next_power_of_2(head_dim)),
        ROWS=ROWS,
        KEYS=KEYS,
        num_warps=4,
        num_stages=2,
    )
    return out_THd


@triton.jit
def _attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_ptr: tl.tensor,
    start_ptr: tl.tensor,
    count_ptr: tl.tensor,
    row_ptr: tl.tensor,
    table_ptr: tl.tensor,
    width_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    cap: tl.tensor,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    LOG2_E: tl.constexpr,
    PIECE: tl.constexpr,
    STRIDE: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(first_ptr + tile)
    start = tl.load(start_ptr + tile)
    count = tl.load(count_ptr + tile)
    row = tl.load(row_ptr + tile) * tl.load(width_ptr)
    r = tl.arange(0, ROWS)
    token = r // GROUP
    is_query = token < count
    position = start + token
    d = tl.arange(0, WIDE)
    is_d = d < HEAD_DIM
    at = ((first + token) * NUM_KV * GROUP + head * GROUP + r % GROUP) * HEAD_DIM
    q = tl.load(q_ptr + at[:, None] + d[None, :], mask=is_query[:, None] & is_d[None, :], other=0.0)
    last = start + count - 1
    begin = tl.maximum(start - window + 1, 0) // KEYS * KEYS
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    if HAS_SINKS:  # as a first key without a value
        top = tl.load(sinks_ptr + head * GROUP + r % GROUP).to(tl.float32) * LOG2_E
        total += 1.0
    for base in range(begin, last + 1, KEYS):
        p = base + tl.arange(0, KEYS)
        is_key = p <= last
        piece = tl.load(table_ptr + row + p // PIECE, mask=is_key, other=0).to(tl.int64)
        place = (piece * STRIDE + p % PIECE) * NUM_KV + head
        where = place[:, None] * HEAD_DIM + d[None, :]
        is_in = is_key[:, None] & is_d[None, :]
        k = tl.load(k_ptr + where, mask=is_in, other=0.0)
        v = tl.load(v_ptr + where, mask=is_in, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            scores = limit(scores, cap)
        distance = position[:, None] - p[None, :]
        scores = tl.where((distance >= 0) & (distance < window), scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A fully masked block leaves the state bitwise unchanged.
        floor = tl.where(higher == float("-inf"), 0.0, higher)
        keep = tl.exp2(top - floor)
        weights = tl.exp2(scores - floor[:, None])
        total = total * keep + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        top = higher
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr + at[:, None] + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & is_d[None, :],
    )
