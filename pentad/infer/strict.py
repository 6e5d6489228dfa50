"""Strict sampling: attention over the cache and log-probs by the learner's operations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pentad.infer.attend import KVCache, StepRows
from pentad.models.language_model import LanguageModel, bent
from pentad.ops import invariant
from pentad.ops.logprob import compute_logits
from pentad.ops.spans import Spans


def head_logits(model: LanguageModel, hidden_ND: Tensor, *, strict: bool) -> Tensor:
    """Returns logits in fp32, as computed by the learner."""
    if strict:
        logits_NV = invariant.exact_linear(hidden_ND, model.head_weight, wide=True)
        return invariant.limited(logits_NV, model.logit_cap)
    product_NV = compute_logits(hidden_ND, model.head_weight)
    return bent(product_NV, model.logit_scale, model.logit_cap)


def strict_logprobs(logits_NV: Tensor, ids_N: Tensor, temperature_N: Tensor) -> Tensor:
    """Returns log-probs. `temperature_N`: fp64; 0 counts as 1."""
    scale_N = torch.where(temperature_N > 0, 1.0 / temperature_N, 1.0).float()
    return invariant.label_logprobs(logits_NV, ids_N, scale_N)[0]


class StrictAttend:
    """The attention core of any step, with any mixture of prefill and decode."""

    def __init__(self, cache: KVCache, rows: StepRows) -> None:
        self.cache = cache
        self.places_T = rows.places_T
        starts, counts = rows.starts, rows.counts
        size = cache.block_size
        width = int(-(-(starts + counts).max() // size))
        table = np.ascontiguousarray(rows.blocks[:, :width])
        first = np.cumsum(counts) - counts
        self.spans = Spans(first, starts, counts, table, size, size)
        self.tiles = None

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
        pages.write(self.places_T, k_TKd, v_TKd)
        k_PKd, v_PKd = pages.k_BbKd.flatten(0, 1), pages.v_BbKd.flatten(0, 1)
        if not q_THd.is_cuda:
            return invariant.attend_spans(q_THd, k_PKd, v_PKd, self.spans, window, sinks, cap)
        kernels = invariant.kernels()
        if self.tiles is None:
            group = q_THd.shape[1] // k_TKd.shape[1]
            self.tiles = kernels.tiles_of(self.spans, group, q_THd.device)
        q_THd = q_THd.contiguous()
        result: Tensor = kernels.attend(q_THd, k_PKd, v_PKd, self.tiles, window, sinks, cap)
        return result
