"""Attention of a GPU step with prefills: each sequence uses the kernel for its kind.

One new token: the paged decode kernel. A prompt from its beginning: packed attention over the new
keys and values only. A later chunk, and prompts of latent attention: plain torch over the cache.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from pentad.core.types import Attend
from pentad.infer.attend import KVCache, PagedAttend, StepRows
from pentad.ops.attention import build_attend, by_width
from pentad.ops.fused import store
from pentad.ops.latent_decode import decode


class MixedAttend:
    """Attention core of a GPU step with prefills."""

    def __init__(self, cache: KVCache, rows: StepRows, dtype: torch.dtype) -> None:
        """`dtype`: that of the queries."""
        self.cache = cache
        self.places_T = rows.places_T
        starts, counts, blocks = rows.starts, rows.counts, rows.blocks
        is_single = counts == 1
        is_fresh = (starts == 0) & (counts > 1) & cache.has_values
        self.single_T = self.tokens_of(is_single, counts)
        self.fresh_T = self.tokens_of(is_fresh, counts)
        self.later_T = self.tokens_of(~is_single & ~is_fresh, counts)
        if len(self.single_T):
            self.lengths_S = self.put(starts[is_single] + 1)
            width = int(-(-(starts[is_single].max() + 1) // cache.block_size))
            self.blocks = self.put(blocks[is_single, :width].reshape(-1))
            self.width = self.put(np.array([width]))
        self.fresh: Attend | None = None
        if len(self.fresh_T):
            lengths = counts[is_fresh].tolist()
            build = partial(build_attend, lengths, device=cache.device, dtype=dtype)
            build = partial(build, capped=cache.capped)
            self.fresh = by_width(build, cache.widths)
        self.later: PagedAttend | None = None
        if len(self.later_T):
            is_later = ~is_single & ~is_fresh
            later = StepRows(starts[is_later], counts[is_later], blocks[is_later], rows.places_T)
            self.later = PagedAttend(cache, later)

    def tokens_of(self, is_in: np.ndarray, counts: np.ndarray) -> Tensor:
        return self.put(np.flatnonzero(np.repeat(is_in, counts)))

    def put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.cache.device, non_blocking=True)

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        window: int | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        pages = self.cache.layer(layer)
        store(pages, self.places_T, k_TKd, v_TKd)
        if self.fresh is not None and len(self.fresh_T) == len(q_THd):
            return self.fresh(layer, q_THd, k_TKd, v_TKd.contiguous(), window, sinks, cap)
        o_THd = q_THd.new_empty(*q_THd.shape[:2], pages.v_BbKd.shape[-1])
        if len(self.single_T):
            q_SHd = q_THd.index_select(0, self.single_T)
            table = (self.blocks, self.width, self.lengths_S)
            out = decode(q_SHd, pages, *table, window, sinks, cap)
            o_THd.index_copy_(0, self.single_T, out)
        if self.fresh is not None:
            q, k, v = (x.index_select(0, self.fresh_T) for x in (q_THd, k_TKd, v_TKd))
            o_THd.index_copy_(0, self.fresh_T, self.fresh(layer, q, k, v, window, sinks, cap))
        if self.later is not None:
            q = q_THd.index_select(0, self.later_T)
            out = self.later.attend(layer, q, window, sinks, cap)
            o_THd.index_copy_(0, self.later_T, out)
        return o_THd
