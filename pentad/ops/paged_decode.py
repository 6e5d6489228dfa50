"""Attention of one new token per sequence over a paged key-value cache: Triton kernels, reference.

Shape letters: S sequences, H query heads, K key-value heads, d head width, B blocks of b places.

One program handles one sequence and one key-value head, so keys and values are read once for all
query heads that share them. With few programs, the places of a sequence are split among several,
and a second kernel merges the results. Lengths, block table and its width are read from device
memory, so CUDA graphs work.

Tensor cores need 8-bit operands in another order than the cache has. So an 8-bit cache is loaded as
16-bit words, two neighbouring elements each, and unpacked in registers: even and odd elements of a
head have separate products.
"""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.ops.pages import Pages
from pentad.ops.shared_places import (
    LEAST_PLACES,
    PREFIX,
    SUFFIX,
    WHOLE,
    SharedRows,
    expected_tiles,
    prefix_tile,
    rows_and_places,
    rows_per_tile,
)
from pentad.ops.sinks import limited
from pentad.ops.spans import NO_WINDOW

TILE = {"places": 32, "warps": 2, "stages": 2}
EIGHT_BIT_TILE = {"places": 64, "warps": 2, "stages": 2}
"""Places per load of a program, its warps, and pipelined loads: the fastest that
`benchmarks/kv_cache_gpu.py tiles` finds on an H200."""
MIN_PROGRAMS = 512
"""Splits are added up to about this number of programs: a few per multiprocessor."""
MAX_SPLITS = 16
MIN_DOT = 16
"""Smallest side of a tensor-core tile."""


def reference_decode(
    q_SHd: Tensor,
    pages: Pages,
    blocks_SB: Tensor,
    lengths_S: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Reference implementation: a loop over sequences."""
    block_size, num_kv_heads = pages.k_BbKd.shape[1:3]
    group = q_SHd.shape[1] // num_kv_heads
    out = q_SHd.new_empty(*q_SHd.shape[:2], pages.v_BbKd.shape[-1])
    for s, length in enumerate(lengths_S.tolist()):
        blocks = blocks_SB[s, : -(-length // block_size)].long()
        first = 0 if window is None else max(0, length - window)
        k, v = (
            x.flatten(0, 1)[first:length].repeat_interleave(group, 1).float()
            for x in pages.read(blocks, torch.float32)
        )
        scores = torch.einsum("hd,phd->hp", q_SHd[s].float(), k) * q_SHd.shape[-1] ** -0.5
        scores = limited(scores, cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None]], dim=-1)
        weights = scores.softmax(-1)[:, : len(k)]
        out[s] = torch.einsum("hp,phd->hd", weights, v).to(q_SHd.dtype)
    return out


def paged_decode(
    q_SHd: Tensor,
    pages: Pages,
    blocks: Tensor,
    width: Tensor,
    lengths_S: Tensor,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
    *,
    shared: SharedRows | None = None,
) -> Tensor:
    """Decodes one token per sequence. Table row s: `blocks[s * width : (s + 1) * width]`. With
    `shared`, the places that rows share are read once for several rows."""
    num_seqs, num_heads = q_SHd.shape[:2]
    num_kv_heads = pages.k_BbKd.shape[2]
    assert q_SHd.is_contiguous()
    assert pages.k_BbKd.is_contiguous() and pages.v_BbKd.is_contiguous()
    out_SHd = torch.empty_like(q_SHd)
    group = num_heads // num_kv_heads
    table = (blocks, width, lengths_S, q_SHd if sinks is None else sinks)
    if window is not None or sinks is not None:
        shared = None
    splits = num_splits(num_seqs * num_kv_heads)
    before = 0 if shared is None else num_splits(expected_tiles(num_seqs) * num_kv_heads)
    parts = make_parts(out_SHd, before + splits)
    limits = (window, sinks is not None, cap)
    launch = partial(_launch, q_SHd, pages, (out_SHd, *parts), table, *limits)
    tile = tile_of(pages, q_SHd)
    if shared is None:
        launch(None, WHOLE, num_seqs, group, (0, splits), tile)
    else:
        queries = rows_per_tile(group) * group
        wide_tile = tile | prefix_tile(q_SHd.dtype, q_SHd.shape[-1])
        launch(shared, PREFIX, len(shared.firsts_I), queries, (0, before), wide_tile)
        launch(shared, SUFFIX, num_seqs, group, (before, splits), tile)
    merge_splits(out_SHd, parts, shared, before)
    return out_SHd


def _launch(
    q_SHd: Tensor,
    pages: Pages,
    results: tuple[Tensor, ...],
    table: tuple[Tensor, ...],
    window: int | None,
    has_sinks: bool,
    cap: float | None,
    shared: SharedRows | None,
    phase: tl.constexpr,
    num_tiles: int,
    num_queries: int,
    first_and_splits: tuple[int, int],
    tile: dict[str, object],
) -> None:
    """Launches one phase: one program per row, or tile of rows, key-value head and split."""
    num_heads, head_dim = q_SHd.shape[1:]
    block_size, num_kv_heads = pages.k_BbKd.shape[1:3]
    k_BbKd, v_BbKd, is_small = pages.k_BbKd, pages.v_BbKd, pages.largest is not None
    if is_small:
        k_BbKd, v_BbKd = k_BbKd.view(torch.int16), v_BbKd.view(torch.int16)
    kernel = _attend_8 if is_small else _attend
    first_split, splits = first_and_splits
    unused = (table[2],) * 3
    kernel[(num_tiles, num_kv_heads, splits)](
        q_SHd,
        k_BbKd,
        v_BbKd,
        *((pages.k_scale_BbK, pages.v_scale_BbK) if is_small else ()),
        *results,
        *table,
        *(unused if shared is None else (shared.shared_S, shared.firsts_I, shared.counts_I)),
        head_dim**-0.5,
        NO_WINDOW if window is None else window,
        cap or 0.0,
        PHASE=phase,
        PART_SPLITS=results[2].shape[-1],
        FIRST_SPLIT=first_split,
        HAS_SINKS=has_sinks,
        HAS_CAP=cap is not None,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        WIDE_DIM=max(MIN_DOT, triton.next_power_of_2(k_BbKd.shape[-1])),
        WIDE_GROUP=max(MIN_DOT, triton.next_power_of_2(num_queries)),
        BLOCK_SIZE=block_size,
        SPLITS=splits,
        **tile,
    )


SplitResults: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""For each split: sum of values, maximum, and sum of weights."""


def make_parts(out_SHd: Tensor, splits: int) -> SplitResults:
    """Memory for the partial results; unused with one split."""
    shape = (*out_SHd.shape[:2], splits)
    sizes = ((*shape, out_SHd.shape[-1]), shape, shape)
    acc, top, total = (out_SHd.new_empty(size, dtype=torch.float32) for size in sizes)
    return acc, top, total


def merge_splits(
    out_SHd: Tensor, parts: SplitResults, shared: SharedRows | None = None, before: int = 0
) -> None:
    """Merges the partial results, if there are several, of each sequence and head. The first
    `before` of them are those of shared places, unset in rows without."""
    num_seqs, num_heads, head_dim = out_SHd.shape
    splits = parts[1].shape[-1]
    if splits == 1:
        return
    _merge[(num_seqs, num_heads)](
        out_SHd,
        *parts,
        out_SHd if shared is None else shared.shared_S,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        WIDE_DIM=triton.next_power_of_2(head_dim),
        SPLITS=splits,
        WIDE_SPLITS=triton.next_power_of_2(splits),
        BEFORE=before,
        num_warps=1,
    )


def tile_of(pages: Pages, q_SHd: Tensor) -> dict[str, object]:
    """Tile sizes and multiplication mode of a program."""
    precision = "ieee" if q_SHd.dtype == torch.float32 else "tf32"
    tile, own = TILE, {}
    if pages.largest is not None:
        tile = EIGHT_BIT_TILE
        own["IS_INT"] = pages.k_BbKd.dtype == torch.int8
        # Products of bf16 pairs came with compute capability 9.0.
        has_pairs = q_SHd.is_cuda and torch.cuda.get_device_capability(q_SHd.device) >= (9, 0)
        own["HAS_PAIRS"] = q_SHd.dtype == torch.bfloat16 and has_pairs
    size = {"PLACES": tile["places"], "num_warps": tile["warps"], "num_stages": tile["stages"]}
    return {**size, **own, "PRECISION": precision}


def num_splits(num_programs: int) -> int:
    """Number of splits, a power of two, that fills the device."""
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
    sinks_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    cap: tl.tensor,
    PHASE: tl.constexpr,
    PART_SPLITS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
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
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    width = tl.load(width_ptr).to(tl.int32)
    row, count, first, length = rows_and_places(
        lengths_ptr, window, shared_ptr, firsts_ptr, counts_ptr, PHASE
    )
    each = tl.cdiv(tl.cdiv(length - first, SPLITS), PLACES) * PLACES
    if PHASE == PREFIX:
        each = tl.maximum(each, LEAST_PLACES)
    start = first + split * each
    end = tl.minimum(start + each, length)

    g = tl.arange(0, WIDE_GROUP)
    d = tl.arange(0, WIDE_DIM)
    head = kv_head * GROUP + g % GROUP
    at_head = (row + g // GROUP) * NUM_HEADS + head
    is_query = g < count * GROUP
    q_mask = is_query[:, None] & (d < HEAD_DIM)[None, :]
    q_at = at_head[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)

    top = tl.full([WIDE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([WIDE_GROUP], tl.float32)
    if HAS_SINKS:
        top, total = _with_sink(top, total, sinks_ptr + head, is_query, split)
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
        if HAS_CAP:
            scores = limit(scores, cap)
        scores = tl.where(is_in[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - new_top)
        weights = tl.exp(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = new_top

    if PART_SPLITS == 1:
        out = acc / total[:, None]
        tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=q_mask)
    else:
        part = at_head * PART_SPLITS + FIRST_SPLIT + split
        is_used = g < tl.where(start < end, count * GROUP, 0)
        acc_mask = is_used[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(part_acc_ptr + part[:, None] * HEAD_DIM + d[None, :], acc, mask=acc_mask)
        tl.store(part_max_ptr + part, top, mask=is_query)
        tl.store(part_sum_ptr + part, total, mask=is_query)


@triton.jit
def limit(scores: tl.tensor, cap: tl.tensor) -> tl.tensor:
    """cap * tanh(scores / cap), as tanh(x) = 2 * sigmoid(2 * x) - 1."""
    return cap * (2 * tl.sigmoid(2 * scores / cap) - 1)


@triton.jit
def _with_sink(
    top: tl.tensor, total: tl.tensor, sink_ptr: tl.tensor, mask: tl.tensor, split: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Adds the sinks, as first keys without value, to the first split only."""
    sink = tl.load(sink_ptr, mask=mask, other=0.0).to(tl.float32)
    return tl.where(split == 0, sink, top), tl.where(split == 0, 1.0, total)


INT8_PAIRS = tl.constexpr("""{
.reg .b32 low, base, high;
lop3.b32 low, $2, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 base, $2, 0x00800080, 0x43004300, 0xEA;
sub.bf16x2 $0, low, base;
shr.u32 high, $2, 8;
lop3.b32 low, high, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 base, high, 0x00800080, 0x43004300, 0xEA;
sub.bf16x2 $1, low, base;
}""")
"""0x4300 is 128 in bf16, where seven mantissa bits count ones: computes 128 + the low seven bits of
a number, minus 128, or minus 256 if it is negative."""
FP8_PAIRS = tl.constexpr("""{
.reg .b32 bits, sign, power;
mov.b32 power, 0x7b807b80;
and.b32 bits, $2, 0x007f007f;
shl.b32 bits, bits, 4;
and.b32 sign, $2, 0x00800080;
shl.b32 sign, sign, 8;
or.b32 bits, bits, sign;
mul.bf16x2 $0, bits, power;
and.b32 bits, $2, 0x7f007f00;
shr.u32 bits, bits, 4;
lop3.b32 bits, $2, 0x80008000, bits, 0xEA;
mul.bf16x2 $1, bits, power;
}""")
"""Moves exponent and mantissa to the lowest bits of bf16's: the number times 2**-120."""


@triton.jit
def _halves(
    pairs: tl.tensor, dtype: tl.constexpr, IS_INT: tl.constexpr, HAS_PAIRS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Unpacks the low and the high bytes of 16-bit words."""
    if HAS_PAIRS:
        return tl.inline_asm_elementwise(
            INT8_PAIRS if IS_INT else FP8_PAIRS,
            "=r,=r,r",
            [pairs],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    bits = pairs.to(tl.int32)
    low, high = bits & 0xFF, (bits >> 8) & 0xFF
    return _number(low, IS_INT).to(dtype), _number(high, IS_INT).to(dtype)


@triton.jit
def _number(byte: tl.tensor, IS_INT: tl.constexpr) -> tl.tensor:
    if IS_INT:
        return ((byte ^ 0x80) - 0x80).to(tl.float32)
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def _attend_8(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    k_scale_ptr: tl.tensor,
    v_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_acc_ptr: tl.tensor,
    part_max_ptr: tl.tensor,
    part_sum_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    width_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    cap: tl.tensor,
    PHASE: tl.constexpr,
    PART_SPLITS: tl.constexpr,
    FIRST_SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    WIDE_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLACES: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_INT: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    width = tl.load(width_ptr).to(tl.int32)
    row, count, first, length = rows_and_places(
        lengths_ptr, window, shared_ptr, firsts_ptr, counts_ptr, PHASE
    )
    each = tl.cdiv(tl.cdiv(length - first, SPLITS), PLACES) * PLACES
    if PHASE == PREFIX:
        each = tl.maximum(each, LEAST_PLACES)
    start = first + split * each
    end = tl.minimum(start + each, length)

    g = tl.arange(0, WIDE_GROUP)
    h = tl.arange(0, WIDE_DIM)
    head = kv_head * GROUP + g % GROUP
    at_head = (row + g // GROUP) * NUM_HEADS + head
    is_query = g < count * GROUP
    q_mask = is_query[:, None] & (h < HALF)[None, :]
    q_at = at_head[:, None] * HEAD_DIM + 2 * h[None, :]
    q_even = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
    q_odd = tl.load(q_ptr + q_at + 1, mask=q_mask, other=0.0)

    top = tl.full([WIDE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([WIDE_GROUP], tl.float32)
    if HAS_SINKS:
        top, total = _with_sink(top, total, sinks_ptr + head, is_query, split)
    acc_even = tl.zeros([WIDE_GROUP, WIDE_DIM], tl.float32)
    acc_odd = tl.zeros([WIDE_GROUP, WIDE_DIM], tl.float32)
    for begin in range(start, end, PLACES):
        place = begin + tl.arange(0, PLACES)
        is_in = place < end
        block = tl.load(blocks_ptr + row * width + place // BLOCK_SIZE, mask=is_in, other=0)
        at = (block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        mask = is_in[:, None] & (h < HALF)[None, :]
        k = tl.load(k_ptr + (at * HALF)[:, None] + h[None, :], mask=mask, other=0)
        v = tl.load(v_ptr + (at * HALF)[:, None] + h[None, :], mask=mask, other=0)
        k_scale = tl.load(k_scale_ptr + at, mask=is_in, other=0.0)
        v_scale = tl.load(v_scale_ptr + at, mask=is_in, other=0.0)
        k_even, k_odd = _halves(k, q_even.dtype, IS_INT, HAS_PAIRS)
        scores = tl.dot(q_even, tl.trans(k_even), input_precision=PRECISION)
        scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision=PRECISION)
        scores = scores * (scale * k_scale)[None, :]
        if HAS_CAP:
            scores = limit(scores, cap)
        scores = tl.where(is_in[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - new_top)
        weights = tl.exp(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        scaled = (weights * v_scale[None, :]).to(q_even.dtype)
        v_even, v_odd = _halves(v, q_even.dtype, IS_INT, HAS_PAIRS)
        acc_even = acc_even * shrink[:, None]
        acc_odd = acc_odd * shrink[:, None]
        acc_even += tl.dot(scaled, v_even, input_precision=PRECISION)
        acc_odd += tl.dot(scaled, v_odd, input_precision=PRECISION)
        top = new_top

    if PART_SPLITS == 1:
        out_type = out_ptr.dtype.element_ty
        tl.store(out_ptr + q_at, (acc_even / total[:, None]).to(out_type), mask=q_mask)
        tl.store(out_ptr + q_at + 1, (acc_odd / total[:, None]).to(out_type), mask=q_mask)
    else:
        part = at_head * PART_SPLITS + FIRST_SPLIT + split
        part_at = part[:, None] * HEAD_DIM + 2 * h[None, :]
        is_used = g < tl.where(start < end, count * GROUP, 0)
        acc_mask = is_used[:, None] & (h < HALF)[None, :]
        tl.store(part_acc_ptr + part_at, acc_even, mask=acc_mask)
        tl.store(part_acc_ptr + part_at + 1, acc_odd, mask=acc_mask)
        tl.store(part_max_ptr + part, top, mask=is_query)
        tl.store(part_sum_ptr + part, total, mask=is_query)


@triton.jit
def _merge(
    out_ptr: tl.tensor,
    part_acc_ptr: tl.tensor,
    part_max_ptr: tl.tensor,
    part_sum_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDE_SPLITS: tl.constexpr,
    BEFORE: tl.constexpr,
) -> None:
    row = tl.program_id(0) * NUM_HEADS + tl.program_id(1)
    split = tl.arange(0, WIDE_SPLITS)
    is_set = split < SPLITS
    if BEFORE > 0:
        first = tl.where(tl.load(shared_ptr + tl.program_id(0)) > 0, 0, BEFORE)
        is_set = is_set & (split >= first)
    d = tl.arange(0, WIDE_DIM)
    top = tl.load(part_max_ptr + row * SPLITS + split, mask=is_set, other=float("-inf"))
    total = tl.load(part_sum_ptr + row * SPLITS + split, mask=is_set, other=0.0)
    # A split without places has top = -inf, so its weight is 0, and no values.
    weight = tl.exp(top - tl.max(top, 0))
    at = (row * SPLITS + split)[:, None] * HEAD_DIM + d[None, :]
    mask = (top > float("-inf"))[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.load(part_acc_ptr + at, mask=mask, other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(out_ptr + row * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
