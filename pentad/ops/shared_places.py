"""Places of the paged cache that several rows share: their tiles, parts of the kernels, reference.

A group's answers have their prompt in the same blocks. In the first phase a tile of rows attends to
the places that it shares, with the queries of all its rows as one matrix; in the second each row
attends to its other places. The phases' results are merged like those of splits. Sums have another
order than in one phase, so results differ by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentad.ops.pages import Pages
from pentad.ops.sinks import limited

TILE = {"places": 64, "warps": 4, "stages": 2}
WIDE_TILE = {"places": 32, "warps": 4, "stages": 2}
"""For heads of more than 256 numbers, which exceed the shared memory of most GPUs otherwise."""
FLOAT32_TILE = {"places": 16, "warps": 4, "stages": 1}
"""Tile for float32, which needs twice the shared memory."""
MAX_QUERIES = 32
"""Queries of a tile: rows x query heads of a key-value head."""
LEAST_PLACES = tl.constexpr(256)
"""Shared places of a split, at least."""
TYPICAL_ROWS = 16
"""Rows that share places, for the number of splits."""
WHOLE, PREFIX, SUFFIX = (tl.constexpr(phase) for phase in range(3))
"""What a kernel attends to: all places of a row; those that a tile shares; the others of a row."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Tiles of neighbouring rows of a step whose first places are in the same blocks. Tile i:
    `counts_I[i]` rows from `firsts_I[i]` on; a tile without rows is padding."""

    shared_S: Tensor
    """Number of places that each row shares with the others of its tile; 0: in no tile."""
    firsts_I: Tensor
    counts_I: Tensor


def rows_per_tile(group: int) -> int:
    """Most rows of a tile, with `group` query heads of a key-value head each."""
    return max(1, MAX_QUERIES // group)


def expected_tiles(num_rows: int) -> int:
    return max(1, num_rows // TYPICAL_ROWS)


def prefix_tile(dtype: torch.dtype, head_dim: int) -> dict[str, object]:
    """Places per load, warps and pipelined loads of a program over shared places."""
    tile = TILE if head_dim <= 256 else WIDE_TILE
    tile = FLOAT32_TILE if dtype == torch.float32 else tile
    return {"PLACES": tile["places"], "num_warps": tile["warps"], "num_stages": tile["stages"]}


def reference_shared_decode(
    q_SHd: Tensor,
    pages: Pages,
    blocks_SB: Tensor,
    lengths_S: Tensor,
    shared: SharedRows,
    cap: float | None = None,
) -> Tensor:
    """Reference implementation: a loop over tiles, then over sequences."""
    block_size, num_kv_heads = pages.k_BbKd.shape[1:3]
    num_seqs, num_heads, head_dim = q_SHd.shape
    q_SKGd = q_SHd.view(num_seqs, num_kv_heads, -1, head_dim).float() * head_dim**-0.5
    acc = q_SHd.new_zeros(*q_SKGd.shape[:3], pages.v_BbKd.shape[-1], dtype=torch.float32)
    top = torch.full_like(acc[..., 0], float("-inf"))
    total = torch.zeros_like(top)

    def attend(rows: slice, begin: int, end: int) -> None:
        """Adds places of the first of these rows to the state of all of them."""
        blocks = blocks_SB[rows.start, : -(-end // block_size)].long()
        k_PKd, v_PKd = (x.flatten(0, 1)[begin:end] for x in pages.read(blocks, torch.float32))
        scores = limited(torch.einsum("skgd,pkd->skgp", q_SKGd[rows], k_PKd.float()), cap)
        new_top = torch.maximum(top[rows], scores.amax(-1))
        shrink, weights = (top[rows] - new_top).exp(), (scores - new_top[..., None]).exp()
        values = torch.einsum("skgp,pkd->skgd", weights, v_PKd.float())
        acc[rows] = acc[rows] * shrink[..., None] + values
        total[rows] = total[rows] * shrink + weights.sum(-1)
        top[rows] = new_top

    first_of = shared.shared_S.tolist()
    for first, count in zip(shared.firsts_I.tolist(), shared.counts_I.tolist(), strict=True):
        if count:
            attend(slice(first, first + count), 0, first_of[first])
    for s, length in enumerate(lengths_S.tolist()):
        attend(slice(s, s + 1), first_of[s], length)
    return (acc / total[..., None]).flatten(1, 2).to(q_SHd.dtype)


@triton.jit
def rows_and_places(
    lengths_ptr: tl.tensor,
    window: tl.tensor,
    shared_ptr: tl.tensor,
    firsts_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    PHASE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Returns the first row of the program, the number of its rows, and their first and last place
    plus one."""
    row = tl.program_id(0)
    if PHASE == PREFIX:
        count = tl.load(counts_ptr + row).to(tl.int32)
        row = tl.load(firsts_ptr + row).to(tl.int32)
        length = tl.load(shared_ptr + row, mask=count > 0, other=0).to(tl.int32)
        return row, count, length * 0, length
    length = tl.load(lengths_ptr + row).to(tl.int32)
    if PHASE == SUFFIX:
        return row, 1, tl.load(shared_ptr + row).to(tl.int32), length
    return row, 1, tl.maximum(length - window, 0), length
