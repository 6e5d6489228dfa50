"""Attention sinks: a learned logit for each query head, which joins the softmax of a query without
a value (https://arxiv.org/abs/2309.17453, https://arxiv.org/abs/2508.10925); and limited scores,
cap * tanh(score / cap) (https://arxiv.org/abs/2408.00118), in plain torch.

A kernel without sinks returns out and lse, the log-sum-exp of the scores of a query. With a sink s
the log-sum-exp is l = log(exp(lse) + exp(s)), and the result is out * exp(lse - l). Backward of the
same kernel, given that result and l, computes the gradients of queries, keys and values: it
rebuilds the weights as exp(score - l). The sink's own weight is exp(s - l), and its gradient minus
that weight times the product of the result and its gradient.

Shapes: S sequences, H query heads, K key-value heads, L queries, P keys, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_SCORES = 1 << 28
"""Maximum number of scores in memory at once without gradient."""
HOST_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
HOST_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def scaled_by_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Applies sinks to kernel results [..., d] and their log-sum-exp [...]; returns both."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return (out * (lse - total).exp()[..., None]).to(out.dtype), total


def sink_gradients(grad: Tensor, out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Sink gradient of every query, given the results with sinks; not yet summed over queries."""
    weight = (sinks.to(total.dtype) - total).exp()
    return -weight * (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)


def limited(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap); x without a cap."""
    return x if cap is None else cap * torch.tanh(x / cap)


def attend_limited(
    q_SHLd: Tensor,
    k_SKPd: Tensor,
    v_SKPd: Tensor,
    cap: float,
    *,
    is_causal: bool = False,
    seen: Tensor | None = None,
) -> Tensor:
    """`attend_with_sinks` with limited scores instead of sinks, in plain torch on all devices."""
    assert not is_causal or q_SHLd.shape[2] == k_SKPd.shape[2], "one query for each key"
    mask = _as_bias(seen, q_SHLd.dtype)
    run = _written_out if torch.is_grad_enabled() else in_parts
    return run(q_SHLd, k_SKPd, v_SKPd, None, mask, is_causal=is_causal, cap=cap)


def _as_bias(seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if seen is None or seen.dtype != torch.bool:
        return seen
    zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return zeros.masked_fill(~seen, float("-inf"))


def attend_with_sinks(
    q_SHLd: Tensor,
    k_SKPd: Tensor,
    v_SKPd: Tensor,
    sinks_H: Tensor,
    *,
    is_causal: bool = False,
    seen: Tensor | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` with sinks. `seen` is a boolean mask of visible keys or a
    float bias that is added to the scores. Sinks may have a column for each query."""
    sinks = sinks_H if sinks_H.ndim > 1 else sinks_H[:, None]
    mask = _as_bias(seen, q_SHLd.dtype)
    if q_SHLd.device.type == "cpu":
        result: Tensor = _OnHost.apply(q_SHLd, k_SKPd, v_SKPd, sinks, mask, is_causal)
        return result
    # Backward needs all scores at once.
    run = _written_out if torch.is_grad_enabled() else in_parts
    return run(q_SHLd, k_SKPd, v_SKPd, sinks, mask, is_causal=is_causal)


def in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    *,
    is_causal: bool = False,
    cap: float | None = None,
) -> Tensor:
    """Processes queries in slices, so that at most `MAX_SCORES` scores are in memory."""
    num, heads, length = q.shape[:3]
    step = max(1, MAX_SCORES // (num * heads * k.shape[2]))
    parts = []
    for part in (slice(at, at + step) for at in range(0, length, step)):
        own_sinks = sinks if sinks is None or sinks.shape[1] == 1 else sinks[:, part]
        own_mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., part, :]
        given = (q[:, :, part], k, v, own_sinks, own_mask, is_causal)
        parts.append(_written_out(*given, cap=cap, first=part.start))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    cap: float | None = None,
    first: int = 0,
) -> Tensor:
    """Attention with sinks or limited scores in plain torch, where no kernel has them or returns
    log-sum-exps. `first`: place of the first query."""
    k, v = _for_each_head(q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = limited((q @ k.transpose(-1, -2)).to(wide) * q.shape[-1] ** -0.5, cap)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + first)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    column = sinks.to(wide)[..., None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v


def _for_each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats keys and values for the query heads that share them."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return k, v
    return k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


class _OnHost(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        wide = _for_each_head(q, k, v)
        out, lse = HOST_KERNEL(q, *wide, 0.0, is_causal, attn_mask=mask)
        out, total = scaled_by_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, total, sinks, mask)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total, sinks, mask = ctx.saved_tensors
        given = (grads[0], q, *_for_each_head(q, k, v), out, total)
        dq, *wide = HOST_BACKWARD(*given, 0.0, ctx.is_causal, attn_mask=mask)
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in wide)
        dsinks = sink_gradients(grads[0], out, total, sinks).sum_to_size(sinks.shape)
        return dq, dk, dv, dsinks.to(sinks.dtype), None, None
