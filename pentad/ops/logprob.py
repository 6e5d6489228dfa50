"""Log-probability and entropy of labels, fused with the lm head.

Logits are computed in chunks of tokens sized by a byte budget, and recomputed in backward, so the
full T x V logits are never in memory. `keep` stores them for backward instead, which saves the
second product. Both give the same bits. Backward also needs the hidden states, the head and two
numbers per token. The softmax runs in fp32 (fp64 for fp64 inputs) whatever the dtype of the head.
On a GPU Triton kernels read each chunk once; elsewhere plain torch computes the same.

Shapes: T tokens, C tokens of one chunk, V entries of the vocabulary (of this shard), D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentad.core.sizes import CHUNK_BYTES, LOGIT_COPIES

try:
    from pentad.ops import logprob_kernels as kernels
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Rows of the lm head on this rank, with the reduction over ranks of the vocabulary.

    The gradient of the hidden states is that of this shard only: a caller that uses the same hidden
    states on several shards sums it.
    """

    start: int = 0
    """Vocabulary id of the first row."""
    reduce_max: Callable[[Tensor], Tensor] = _same
    reduce_sum: Callable[[Tensor], Tensor] = _same


WHOLE_VOCAB = VocabShard()


def compute_logits(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """The head's product in at least fp32: rounding logits to bf16 costs up to 0.06 nats each.

    Samplers and learners use this function, so both round equally.
    """
    if hidden_CD.is_cuda and hidden_CD.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden_CD, weight_VD.t(), out_dtype=torch.float32)
    logits_CV = torch.mm(hidden_CD, weight_VD.t())
    return logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()


def reference_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    temperature: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `token_logprobs`; materialises all logits."""
    logits_TV = compute_logits(hidden_TD, weight_VD)
    if cap is not None:
        logits_TV = cap * torch.tanh(logits_TV / cap)
    logp_TV = torch.log_softmax(logits_TV / temperature, dim=-1)
    is_label = labels_T >= 0
    logprobs_T = logp_TV.gather(1, labels_T.clamp(min=0)[:, None])[:, 0]
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    zero = logprobs_T.new_zeros(())
    return torch.where(is_label, logprobs_T, zero), torch.where(is_label, entropy_T, zero)


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    cap: float | None = None,
    chunk_bytes: int | None = None,
    shard: VocabShard = WHOLE_VOCAB,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log p(label), entropy) per token of softmax(hidden @ weight^T / temperature).

    `cap` soft-caps logits x to cap * tanh(x / cap) before the temperature.

    A negative label means no label: both are 0 there and no gradient flows. Both results are
    differentiable; a result that is not used costs nothing in backward. With `keep` the logits
    stay for backward, which frees them chunk by chunk.
    """
    assert temperature > 0, f"temperature {temperature} is not positive"
    budget = chunk_bytes or CHUNK_BYTES[hidden_TD.device.type]
    if cap is not None:  # backward of the cap needs one more array
        budget = budget * LOGIT_COPIES // (LOGIT_COPIES + 1)
    size = chunk_tokens(weight_VD.shape[0], budget, _math_dtype(hidden_TD).itemsize)
    keep = keep and torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden_TD, weight_VD, labels_T, temperature, cap, size, shard, keep
    )
    return result


def chunk_tokens(vocab_size: int, budget_bytes: int, itemsize: int) -> int:
    """Number of tokens whose logits fit in the budget; multiples of 128 keep GEMM tiles full.

    Example: 151936 entries in fp32, 2 GiB: 1152 tokens.
    """
    tokens = budget_bytes // (vocab_size * itemsize * LOGIT_COPIES)
    return max(1, tokens - tokens % 128 if tokens >= 128 else tokens)


def _math_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _iter_chunks(num_tokens: int, size: int) -> Iterator[slice]:
    """Slices of nearly equal size, none above `size`."""
    num_chunks = -(-num_tokens // size)
    bounds = [num_tokens * i // max(num_chunks, 1) for i in range(num_chunks + 1)]
    yield from (slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        temperature: float,
        cap: float | None,
        size: int,
        shard: VocabShard,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_TD.shape[0]
        parts_4T = hidden_TD.new_empty((4, num_tokens), dtype=_math_dtype(hidden_TD))
        column_T = labels_T - shard.start
        ctx.kept = []
        for chunk in _iter_chunks(num_tokens, size):
            logits_CV = _bend(compute_logits(hidden_TD[chunk], weight_VD), cap)
            if keep:
                ctx.kept.append(logits_CV)
            is_fused = _is_fused(logits_CV)
            if keep and not is_fused:  # plain torch overwrites the logits
                logits_CV = logits_CV.clone()
            reduce = kernels.reduce_logits if is_fused else reduce_logits
            reduce(logits_CV, 1.0 / temperature, column_T[chunk], parts_4T[:, chunk])
        logprobs_T, entropy_T, lse_T = _combine(parts_4T, shard)
        no_label_T = labels_T < 0
        logprobs_T, entropy_T = (x.masked_fill(no_label_T, 0) for x in (logprobs_T, entropy_T))
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, lse_T, entropy_T)
        ctx.temperature, ctx.cap, ctx.size, ctx.shard = temperature, cap, size, shard
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, labels_T, lse_T, entropy_T = ctx.saved_tensors
        no_label_T = labels_T < 0
        glp_T, gent_T = (None if g is None else g.masked_fill(no_label_T, 0) for g in grads)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if glp_T is None and gent_T is None:
            return (None,) * 8
        # Overwritten below: with retain_graph, a second backward recomputes them.
        kept, ctx.kept = ctx.kept[::-1], []
        live_N = _live(glp_T, gent_T) if hidden_TD.device.type == "cpu" else None
        if live_N is not None:
            kept.clear()  # later chunks recompute: their products round differently
            full_TD = hidden_TD
            hidden_TD, labels_T, lse_T, entropy_T = (
                x.index_select(0, live_N) for x in (hidden_TD, labels_T, lse_T, entropy_T)
            )
            glp_T, gent_T = (None if g is None else g[live_N] for g in (glp_T, gent_T))
        dhidden_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        # Summed over chunks in full precision.
        dweight_VD = (
            torch.zeros_like(weight_VD, dtype=_math_dtype(weight_VD)) if needs_weight else None
        )
        column_T = labels_T - ctx.shard.start
        for chunk in _iter_chunks(hidden_TD.shape[0], ctx.size):
            logits_CV = (
                kept.pop() if kept else _bend(compute_logits(hidden_TD[chunk], weight_VD), ctx.cap)
            )
            slope_CV = None if ctx.cap is None else 1 - (logits_CV / ctx.cap).square_()
            differentiate = kernels.logit_gradient if _is_fused(logits_CV) else logit_gradient
            dlogits_CV = differentiate(
                logits_CV,
                1.0 / ctx.temperature,
                column_T[chunk],
                lse_T[chunk],
                entropy_T[chunk],
                None if glp_T is None else glp_T[chunk],
                None if gent_T is None else gent_T[chunk],
                hidden_TD.dtype,
            )
            if slope_CV is not None:
                dlogits_CV.mul_(slope_CV)
            if dhidden_TD is not None:
                torch.mm(dlogits_CV, weight_VD, out=dhidden_TD[chunk])
            if dweight_VD is not None:
                _add_product(dweight_VD, dlogits_CV.t(), hidden_TD[chunk])
            del logits_CV, dlogits_CV, slope_CV  # freed before the next chunk
        dweight_VD = None if dweight_VD is None else dweight_VD.to(weight_VD.dtype)
        if live_N is not None and dhidden_TD is not None:
            dhidden_TD = torch.zeros_like(full_TD).index_copy_(0, live_N, dhidden_TD)
        return dhidden_TD, dweight_VD, None, None, None, None, None, None


def _live(*grads: Tensor | None) -> Tensor | None:
    """Indices of tokens with a gradient (such as answer tokens); None means all. Computed only if
    it needs no device synchronization."""
    is_live_T = torch.stack([g != 0 for g in grads if g is not None]).any(0)
    return None if is_live_T.all() else is_live_T.nonzero()[:, 0]


def _bend(x_CV: Tensor, cap: float | None) -> Tensor:
    """Soft cap: cap * tanh(x / cap), in place."""
    return x_CV if cap is None else x_CV.div_(cap).tanh_().mul_(cap)


def _is_fused(logits_CV: Tensor) -> bool:
    return HAS_TRITON and logits_CV.is_cuda and logits_CV.dtype == torch.float32


def _combine(parts_4T: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor, Tensor]:
    """Merges partial results of the shards into (label's log-prob, entropy, log-sum-exp)."""
    own_max_T, sum_T, weighted_T, label_T = parts_4T.unbind()
    max_T = shard.reduce_max(own_max_T)
    fall_T = own_max_T - max_T
    shrink_T = fall_T.exp()
    weighted_T = shrink_T * (weighted_T + fall_T * sum_T)
    sums_3T = shard.reduce_sum(torch.stack([shrink_T * sum_T, weighted_T, label_T]))
    sum_T, weighted_T, label_T = sums_3T.unbind()
    log_sum_T = sum_T.log()
    return label_T - max_T - log_sum_T, log_sum_T - weighted_T / sum_T, max_T + log_sum_T


def _is_here(column_C: Tensor, num_rows: int) -> Tensor:
    return (column_C >= 0) & (column_C < num_rows)


def reduce_logits(
    logits_CV: Tensor, inverse_temperature: float, column_C: Tensor, out_4C: Tensor
) -> None:
    """`logprob_kernels.reduce_logits` in plain torch; overwrites the logits."""
    num_rows = logits_CV.shape[1]
    x_CV = logits_CV.mul_(inverse_temperature)
    label_C = x_CV.gather(1, column_C.clamp(0, num_rows - 1)[:, None])[:, 0]
    max_C = x_CV.amax(-1)
    exp_CV = x_CV.sub_(max_C[:, None]).exp()
    out_4C[0] = max_C
    out_4C[1] = exp_CV.sum(-1)
    out_4C[2] = exp_CV.mul_(x_CV).sum(-1)
    out_4C[3] = label_C * _is_here(column_C, num_rows)


def logit_gradient(
    logits_CV: Tensor,
    inverse_temperature: float,
    column_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    glp_C: Tensor | None,
    gent_C: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`logprob_kernels.logit_gradient` in plain torch; overwrites the logits.

    d logp(label) / dx = onehot - p,   d entropy / dx = -p * (log p + entropy)
    """
    logp_CV = logits_CV.mul_(inverse_temperature).sub_(lse_C[:, None])
    if gent_C is None:
        assert glp_C is not None
        dx_CV = logp_CV.exp_().mul_(-glp_C[:, None])
    else:
        p_CV = logp_CV.exp()
        scale_CV = logp_CV.add_(entropy_C[:, None]).mul_(gent_C[:, None])
        if glp_C is not None:
            scale_CV.add_(glp_C[:, None])
        dx_CV = p_CV.mul_(scale_CV).neg_()
    if glp_C is not None:
        num_rows = dx_CV.shape[1]
        own_C = glp_C * _is_here(column_C, num_rows)
        dx_CV.scatter_add_(1, column_C.clamp(0, num_rows - 1)[:, None], own_C[:, None])
    return dx_CV.mul_(inverse_temperature).to(dtype)


def _add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """sum += a @ b: low-precision inputs, accumulated in the precision of the sum."""
    if a_MK.dtype == sum_MN.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    elif a_MK.is_cuda:
        torch.addmm(sum_MN, a_MK, b_KN, out_dtype=sum_MN.dtype, out=sum_MN)
    else:
        sum_MN.add_(torch.mm(a_MK, b_KN))
