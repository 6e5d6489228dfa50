"""Triton kernel for decoding with multi-head latent attention (MLA) over a paged cache of latents.

Shape letters: S sequences, H query heads, C latent, R rotated key, d = C + R, B blocks of b places.

All heads share one key, whose first C numbers are also the value, so a tile of the cache is read
once for both products. One program handles one sequence, some of its heads and some of its places.
`paged_decode` merges the splits and has the reference implementation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.ops import paged_decode
from pentad.ops.pages import Pages
from pentad.ops.shared_places import SharedRows

STEP = 8
"""Widths must be multiples of this, because loads are vectorised."""
HEADS = 16
"""Heads of a program: the smallest side of a tensor-core tile."""
TILE = {"PLACES": 32, "num_warps": 4, "num_stages": 2}
FLOAT32_TILE = {"PLACES": 16, "num_warps": 4, "num_stages": 1}
"""Tile for float32, which needs twice the shared memory."""


def takes(dims: ModelDims) -> bool:
    """Whether the kernel supports the model's latent dimensions."""
    return dims.kv_latent % STEP == 0 and dims.turned_dim % STEP == 0


def decode(
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
    """Calls `latent_decode` or `paged_decode`, depending on the contents of the pages."""
    if not pages.is_latent:
        table = (blocks, width, lengths_S)
        beside = (window, sinks, cap)
        return paged_decode.paged_decode(q_SHd, pages, *table, *beside, shared=shared)
    assert window is None and sinks is None, "no family has latents with a window or sinks"
    assert cap is None, "no family has latents with limited scores"
    return latent_decode(q_SHd, pages, blocks, width, lengths_S)


def latent_decode(
    q_SHd: Tensor, pages: Pages, blocks: Tensor, width: Tensor, lengths_S: Tensor
) -> Tensor:
    """Decodes one token per sequence; block table as in `paged_decode`, the result has width C."""
    num_seqs, num_heads, head_dim = q_SHd.shape
    latent = pages.v_BbKd.shape[-1]
    assert q_SHd.is_contiguous() and pages.k_BbKd.is_contiguous()
    groups = triton.cdiv(num_heads, HEADS)
    splits = paged_decode.num_splits(num_seqs * groups)
    out_SHC = q_SHd.new_empty(num_seqs, num_heads, latent)
    parts = paged_decode.make_parts(out_SHC, splits)
    is_wide = q_SHd.dtype == torch.float32
    _attend[(num_seqs, groups, splits)](
        q_SHd,
        pages.k_BbKd,
        out_SHC,
        *parts,
        blocks,
        width,
        lengths_S,
        head_dim**-0.5,
        NUM_HEADS=num_heads,
        LATENT=latent,
        TURNED=head_dim - latent,
        WIDE_LATENT=max(paged_decode.MIN_DOT, triton.next_power_of_2(latent)),
        WIDE_TURNED=max(paged_decode.MIN_DOT, triton.next_power_of_2(head_dim - latent)),
        HEADS=HEADS,
        BLOCK_SIZE=pages.k_BbKd.shape[1],
        SPLITS=splits,
        PRECISION="ieee" if is_wide else "tf32",
        **(FLOAT32_TILE if is_wide else TILE),
    )
    paged_decode.merge_splits(out_SHC, parts)
    return out_SHC


@triton.jit
def _attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_acc_ptr: tl.tensor,
    part_max_ptr: tl.tensor,
    part_sum_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    width_ptr: tl.tensor,
    lengths_ptr: tl.tensor,
    scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    TURNED: tl.constexpr,
    WIDE_LATENT: tl.constexpr,
    WIDE_TURNED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    split = tl.program_id(2)
    HEAD_DIM: tl.constexpr = LATENT + TURNED
    length = tl.load(lengths_ptr + row).to(tl.int32)
    width = tl.load(width_ptr).to(tl.int32)
    each = tl.cdiv(tl.cdiv(length, SPLITS), PLACES) * PLACES
    start = split * each
    end = tl.minimum(start + each, length)

    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, WIDE_LATENT)
    r = tl.arange(0, WIDE_TURNED)
    is_head = head < NUM_HEADS
    c_mask = is_head[:, None] & (c < LATENT)[None, :]
    r_mask = is_head[:, None] & (r < TURNED)[None, :]
    q_at = (row * NUM_HEADS + head)[:, None] * HEAD_DIM
    q_latent = tl.load(q_ptr + q_at + c[None, :], mask=c_mask, other=0.0)
    q_turned = tl.load(q_ptr + q_at + LATENT + r[None, :], mask=r_mask, other=0.0)

    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, WIDE_LATENT], tl.float32)
    for begin in range(start, end, PLACES):
        place = begin + tl.arange(0, PLACES)
        is_in = place < end
        block = tl.load(blocks_ptr + row * width + place // BLOCK_SIZE, mask=is_in, other=0)
        at = (block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE) * HEAD_DIM
        at = at[:, None]
        mask = is_in[:, None]
        latent = tl.load(k_ptr + at + c[None, :], mask=mask & (c < LATENT)[None, :], other=0.0)
        turned = tl.load(
            k_ptr + at + LATENT + r[None, :], mask=mask & (r < TURNED)[None, :], other=0.0
        )
        scores = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_turned, tl.trans(turned), scores, input_precision=PRECISION)
        scores = tl.where(is_in[None, :], scores * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - new_top)
        weights = tl.exp(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(latent.dtype), latent, input_precision=PRECISION)
        top = new_top

    at_head = row * NUM_HEADS + head
    if SPLITS == 1:
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at_head[:, None] * LATENT + c[None, :], out, mask=c_mask)
    else:
        part = at_head * SPLITS + split
        tl.store(part_acc_ptr + part[:, None] * LATENT + c[None, :], acc, mask=c_mask)
        tl.store(part_max_ptr + part, top, mask=is_head)
        tl.store(part_sum_ptr + part, total, mask=is_head)
