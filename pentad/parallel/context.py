"""Context parallelism (Ulysses): tokens are split over cp everywhere except in the attention core.

There each rank has all tokens of some heads, by one all-to-all before and one after. If cp has more
ranks than kv heads, each kv head is sent to several ranks. https://arxiv.org/abs/2309.14509

Shapes: T tokens (this rank's outside the core, all inside it), N cp ranks, t tokens of one rank, H
query heads, K key-value heads, h heads of one rank, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pentad.core.types import Attend
from pentad.parallel.collectives import exchange
from pentad.parallel.mesh import Axis


class UlyssesAttend:
    """`core.types.Attend` over this rank's share of the tokens, around a core over all of them."""

    def __init__(self, inner: Attend, cp: Axis) -> None:
        self.inner = inner
        self.cp = cp

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
        num, num_heads = self.cp.size, q_THd.shape[1]
        repeats = max(1, num // k_TKd.shape[1])
        if repeats > 1:
            k_TKd = k_TKd.repeat_interleave(repeats, dim=1)
            v_TKd = v_TKd.repeat_interleave(repeats, dim=1)
        assert num_heads % num == 0 and k_TKd.shape[1] % num == 0, (
            f"{num_heads} query and {k_TKd.shape[1]} key-value heads cannot be split over {num}"
        )
        # The heads of q, k and v of each rank are contiguous, for a single exchange.
        parts = [x.unflatten(1, (num, -1)) for x in (q_THd, k_TKd, v_TKd)]
        sizes = [part.shape[2] for part in parts]
        q, k, v = self._to_heads(torch.cat(parts, dim=2)).split(sizes, dim=1)
        options: dict[str, Any] = {} if window is None else {"window": window}
        if sinks is not None:
            options["sinks"] = sinks.chunk(num)[self.cp.rank]
        if cap is not None:
            options["cap"] = cap
        return self._to_tokens(self.inner(layer, q, k, v, **options))

    def _to_heads(self, x_tNhd: Tensor) -> Tensor:
        """[t, cp, h, d] to [T, h, d]: heads of part r go to rank r."""
        num_tokens, num = x_tNhd.shape[:2]
        return self._swap(x_tNhd.transpose(0, 1).flatten(0, 1), num_tokens, num)

    def _to_tokens(self, o_Thd: Tensor) -> Tensor:
        """[T, h, d] to [t, cp * h, d]: tokens of share r go back to rank r."""
        num = self.cp.size
        num_tokens = o_Thd.shape[0] // num
        o_Nthd = self._swap(o_Thd, num_tokens, num).unflatten(0, (num, num_tokens))
        return o_Nthd.transpose(0, 1).flatten(1, 2)

    def _swap(self, x: Tensor, num_tokens: int, num: int) -> Tensor:
        sizes = [num_tokens] * num
        return exchange(x, self.cp, sizes, sizes)
