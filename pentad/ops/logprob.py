"""Log-probability and entropy of given tokens, fused with the lm head.

The T x V logits are never held: they are made in chunks of tokens sized by a byte budget, and
made again in backward. What is kept for backward is the hidden states, the head and two numbers
per token. The softmax runs in fp32 (fp64 for fp64 inputs) whatever the dtype of the head.

Shapes: T tokens, C tokens of one chunk, V entries of the vocabulary (of this shard), D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
"""Room for the logits of one chunk, their exponentials and their gradient, by device type."""
LOGIT_COPIES = 3
"""How many arrays of the size of the logits are alive at the worst moment of a chunk."""


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Which rows of the head this rank holds, and how to reduce over the ranks that hold the rest.

    The gradient that flows to the hidden states is the part of this shard: whoever gave the same
    hidden states to several shards sums it.
    """

    start: int = 0
    """Vocabulary id of the first row."""
    max_rows: int = 0
    """Rows of the largest shard, 0 for this one's: all ranks must cut the same chunks."""
    reduce_max: Callable[[Tensor], Tensor] = _same
    reduce_sum: Callable[[Tensor], Tensor] = _same


WHOLE_VOCAB = VocabShard()


def compute_logits(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """The head's product in at least fp32: rounding logits to bf16 costs up to 0.06 nats each.

    Samplers use the same function, so that both sides round alike.
    """
    if hidden_CD.is_cuda and hidden_CD.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden_CD, weight_VD.t(), out_dtype=torch.float32)
    logits_CV = torch.mm(hidden_CD, weight_VD.t())
    return logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()


def reference_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What `token_logprobs` computes, written plainly: holds all logits."""
    logp_TV = torch.log_softmax(compute_logits(hidden_TD, weight_VD) / temperature, dim=-1)
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
    chunk_bytes: int | None = None,
    shard: VocabShard = WHOLE_VOCAB,
) -> tuple[Tensor, Tensor]:
    """(log p(label), entropy) per token of softmax(hidden @ weight^T / temperature).

    A negative label means no label: both are 0 there and no gradient flows. Both results are
    differentiable; a result that is not used costs nothing in backward.
    """
    assert temperature > 0, f"temperature {temperature} is not positive"
    budget = chunk_bytes or CHUNK_BYTES[hidden_TD.device.type]
    num_rows = max(shard.max_rows, weight_VD.shape[0])
    size = chunk_tokens(num_rows, budget, _math_dtype(hidden_TD).itemsize)
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden_TD, weight_VD, labels_T, temperature, size, shard
    )
    return result


def chunk_tokens(vocab_size: int, budget_bytes: int, itemsize: int) -> int:
    """How many tokens' logits the budget holds; multiples of 128 keep the products on full tiles.

    Example: 151936 entries in fp32, 2 GiB: 1152 tokens.
    """
    tokens = budget_bytes // (vocab_size * itemsize * LOGIT_COPIES)
    return max(1, tokens - tokens % 128 if tokens >= 128 else tokens)


def _math_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _iter_chunks(num_tokens: int, size: int) -> Iterator[slice]:
    """Slices of nearly equal size, none above `size`."""
    num_chunks = -(-num_tokens // size)
    bounds = [num_tokens * i // num_chunks for i in range(num_chunks + 1)]
    yield from (slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        temperature: float,
        size: int,
        shard: VocabShard,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = hidden_TD.shape[0]
        out_3T = hidden_TD.new_zeros((3, num_tokens), dtype=_math_dtype(hidden_TD))
        for chunk in _iter_chunks(num_tokens, size):
            x_CV = compute_logits(hidden_TD[chunk], weight_VD).mul_(1.0 / temperature)
            _reduce_chunk(x_CV, labels_T[chunk], shard, out_3T[:, chunk])
        logprobs_T, entropy_T, lse_T = out_3T.unbind()
        no_label_T = labels_T < 0
        logprobs_T, entropy_T = (x.masked_fill(no_label_T, 0) for x in (logprobs_T, entropy_T))
        ctx.save_for_backward(hidden_TD, weight_VD, labels_T, lse_T, entropy_T)
        ctx.temperature, ctx.size, ctx.shard = temperature, size, shard
        ctx.set_materialize_grads(False)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, labels_T, lse_T, entropy_T = ctx.saved_tensors
        no_label_T = labels_T < 0
        glp_T, gent_T = (None if g is None else g.masked_fill(no_label_T, 0) for g in grads)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if glp_T is None and gent_T is None:
            return (None,) * 6
        dhidden_TD = torch.empty_like(hidden_TD) if needs_hidden else None
        # The head's gradient is summed over chunks, so in full precision.
        dweight_VD = (
            torch.zeros_like(weight_VD, dtype=_math_dtype(weight_VD)) if needs_weight else None
        )
        for chunk in _iter_chunks(hidden_TD.shape[0], ctx.size):
            x_CV = compute_logits(hidden_TD[chunk], weight_VD).mul_(1.0 / ctx.temperature)
            dx_CV = _logit_gradient(
                x_CV.sub_(lse_T[chunk, None]),
                labels_T[chunk],
                ctx.shard,
                None if glp_T is None else glp_T[chunk],
                None if gent_T is None else gent_T[chunk],
                entropy_T[chunk],
            )
            dlogits_CV = dx_CV.mul_(1.0 / ctx.temperature).to(hidden_TD.dtype)
            if dhidden_TD is not None:
                torch.mm(dlogits_CV, weight_VD, out=dhidden_TD[chunk])
            if dweight_VD is not None:
                _add_product(dweight_VD, dlogits_CV.t(), hidden_TD[chunk])
        dweight_VD = None if dweight_VD is None else dweight_VD.to(weight_VD.dtype)
        return dhidden_TD, dweight_VD, None, None, None, None


def _local_labels(labels_C: Tensor, num_rows: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """(column of the label in this shard, clamped; whether it lies in this shard)."""
    local_C = labels_C - shard.start
    is_here_C = (local_C >= 0) & (local_C < num_rows) & (labels_C >= 0)
    return local_C.clamp(0, num_rows - 1)[:, None], is_here_C


def _reduce_chunk(x_CV: Tensor, labels_C: Tensor, shard: VocabShard, out_3C: Tensor) -> None:
    """Writes (label log-prob, entropy, log-sum-exp) of one chunk; overwrites x."""
    column_C1, is_here_C = _local_labels(labels_C, x_CV.shape[1], shard)
    max_C = shard.reduce_max(x_CV.amax(-1))
    x_CV.sub_(max_C[:, None])
    label_C = x_CV.gather(1, column_C1)[:, 0] * is_here_C
    exp_CV = x_CV.exp()
    sum_C = exp_CV.sum(-1)
    weighted_C = exp_CV.mul_(x_CV).sum(-1)
    sum_C, label_C, weighted_C = shard.reduce_sum(torch.stack([sum_C, label_C, weighted_C]))
    log_sum_C = sum_C.log()
    out_3C[0] = label_C - log_sum_C
    out_3C[1] = log_sum_C - weighted_C / sum_C
    out_3C[2] = max_C + log_sum_C


def _logit_gradient(
    logp_CV: Tensor,
    labels_C: Tensor,
    shard: VocabShard,
    glp_C: Tensor | None,
    gent_C: Tensor | None,
    entropy_C: Tensor,
) -> Tensor:
    """Gradient to x = logits / temperature, given log p over the shard; overwrites it.

    d logp(label) / dx = onehot - p,   d entropy / dx = -p * (log p + entropy)
    """
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
        column_C1, is_here_C = _local_labels(labels_C, dx_CV.shape[1], shard)
        dx_CV.scatter_add_(1, column_C1, (glp_C * is_here_C)[:, None])
    return dx_CV


def _add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """sum += a @ b, the product of low-precision inputs added in the precision of the sum."""
    if a_MK.dtype == sum_MN.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    elif a_MK.is_cuda:
        torch.addmm(sum_MN, a_MK, b_KN, out_dtype=sum_MN.dtype, out=sum_MN)
    else:
        sum_MN.add_(torch.mm(a_MK, b_KN))
