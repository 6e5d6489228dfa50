"""The checksum of `digest` on a GPU: one pass over the words, one Triton kernel a tensor."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
BLOCKS_EACH = 8
"""Blocks one program takes, so that large tensors do not queue up at the sum."""


def add_checksum(words: Tensor, sum_1: Tensor) -> None:
    """Adds the checksum of contiguous 32-bit words to a 64-bit sum, modulo 2**64."""
    num_words = words.numel()
    if num_words:
        grid = (triton.cdiv(num_words, BLOCK * BLOCKS_EACH),)
        _add_checksum[grid](words, sum_1, num_words, BLOCK=BLOCK, EACH=BLOCKS_EACH, num_warps=4)


@triton.jit
def _add_checksum(
    words_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * BLOCK * EACH
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for i in range(EACH):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        is_in = at < num_words
        word = tl.load(words_ptr + at, mask=is_in, other=0).to(tl.int64)
        h = ((at + 1) * -7046029254386353131 ^ word) * -4658895280553007687
        h = (h ^ ((h >> 32) & 0xFFFFFFFF)) * -7723592293110705685
        total += tl.where(is_in, h, 0)
    tl.atomic_add(sum_ptr, tl.sum(total, 0))
