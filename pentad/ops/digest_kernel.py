"""Triton kernel for the checksums of `digest`: one pass over the words of many tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
SPAN = 16 * BLOCK
"""Words per program."""


def checksums(pieces: Sequence[Tensor]) -> Tensor:
    """Checksums of contiguous pieces of 32-bit words on the current device: int64 modulo 2**64."""
    device = pieces[0].device
    sizes = np.array([words.numel() for words in pieces], np.int64)
    num_spans = -(-sizes // SPAN)
    owner = np.repeat(np.arange(len(pieces)), num_spans)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(num_spans) - num_spans, num_spans)) * SPAN
    address = np.array([words.data_ptr() for words in pieces], np.int64)
    table = np.stack([owner, first, sizes[owner], address[owner]])
    sums = torch.zeros(len(pieces), dtype=torch.int64, device=device)
    if len(owner):
        _add_checksums[(len(owner),)](
            torch.from_numpy(table).to(device), sums, BLOCK=BLOCK, SPAN=SPAN, num_warps=4
        )
    return sums


@triton.jit
def _add_checksums(
    table_ptr: tl.tensor, sums_ptr: tl.tensor, BLOCK: tl.constexpr, SPAN: tl.constexpr
) -> None:
    program, num = tl.program_id(0), tl.num_programs(0)
    owner = tl.load(table_ptr + program)
    first = tl.load(table_ptr + num + program)
    size = tl.load(table_ptr + 2 * num + program)
    words_ptr = tl.load(table_ptr + 3 * num + program).to(tl.pointer_type(tl.int32))
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, SPAN, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        is_in = at < size
        word = tl.load(words_ptr + at, mask=is_in, other=0).to(tl.int64)
        h = ((at + 1) * -7046029254386353131 ^ word) * -4658895280553007687
        h = (h ^ ((h >> 32) & 0xFFFFFFFF)) * -7723592293110705685
        total += tl.where(is_in, h, 0)
    tl.atomic_add(sums_ptr + owner, tl.sum(total, 0))
