"""Reward shaping between scorer and advantages, and normalisation of the loss.

Order: scale, clip, then the overlong penalty, so that the clip does not affect the penalty.

A step's gradient is sum(weights * terms) / sum(counts). With n_s sampled tokens in sample s,
n_g in group g, and L the most tokens that may be sampled in one sample:

    token      weight 1        count n_s          mean over all tokens of the batch
    sequence   weight 1/n_s    count 1            mean over samples of their token means
    group      weight 1/n_g    count n_s/n_g      mean over prompts of their token means
    constant   weight 1/L      count 1            mean over samples of token sums, over L (Dr.GRPO)

Weights and counts depend on a sample's own group at most, so any split of the rows over ranks,
microbatches or chunks gives the same gradient. Samples without sampled tokens weigh and count 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pentad.rl.kl import estimate_kl, masked_difference
from pentad.rl.section import KlEstimator, LossNorm

OVERLONG_SHARE = 5
"""Default buffer as a share of the length limit, a fifth as in DAPO (4096 of 20480)."""


def scale_rewards(rewards_S: Tensor, *, scale: float = 1.0, clip: float | None = None) -> Tensor:
    scaled_S = rewards_S * scale
    return scaled_S if clip is None else scaled_S.clamp(-clip, clip)


def overlong_penalties(
    lengths_S: Tensor, *, max_new_tokens: int, buffer: int | None, penalty: float
) -> Tensor:
    """Returns DAPO's soft overlong punishment, to be added to the rewards: 0 down to -penalty.

        0                                  length <= limit - buffer
        penalty * (limit - buffer - length) / buffer      in the buffer
        -penalty                           length >= limit

    https://arxiv.org/abs/2503.14476, equation 13 (where penalty = 1). `lengths_S` counts sampled
    tokens.
    """
    size = max(1, max_new_tokens // OVERLONG_SHARE) if buffer is None else buffer
    excess_S = (lengths_S - (max_new_tokens - size)).clamp(0, size)
    return -penalty * excess_S / size


def kl_rewards(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    mask_T: Tensor,
    *,
    kl_coef: float,
    estimator: KlEstimator,
) -> Tensor:
    """Returns per token -kl_coef * KL(p || ref): the penalty of RLHF, at its own token.

    https://arxiv.org/abs/1909.08593 (with k1). As a reward, k1 gives the right gradient.
    """
    return -kl_coef * estimate_kl(logprobs_T, ref_logprobs_T, mask_T, estimator).detach()


def teacher_rewards(
    teacher_logprobs_T: Tensor, logprobs_T: Tensor, mask_T: Tensor, *, clip: float | None = None
) -> Tensor:
    """Per token log teacher - log student, clipped: minus the k1 estimate of the reverse KL."""
    difference_T = masked_difference(teacher_logprobs_T, logprobs_T, mask_T)
    return difference_T if clip is None else difference_T.clamp(-clip, clip)


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards differ; if not, all group-relative advantages are 0."""
    return len(rewards) > 0 and min(rewards) != max(rewards)


def within_second_moment(log_ratio_T: Tensor, mask_T: Tensor, threshold: float) -> Tensor:
    """M2PO: returns the mask without the fewest tokens of largest squared log-ratio whose removal
    brings the mean square of the rest to `threshold`. https://arxiv.org/abs/2510.01161
    """
    kept_N = mask_T.nonzero().squeeze(1)
    squares_N, order_N = log_ratio_T[kept_N].square().sort(stable=True)
    means_N = squares_N.cumsum(0) / torch.arange(1, kept_N.numel() + 1)
    num_kept = int((means_N <= threshold).sum())  # prefix means of a sorted list never decrease
    trained_T = torch.zeros_like(mask_T)
    trained_T[kept_N[order_N[:num_kept]]] = True
    return trained_T


def proximal_shares(versions_T: Tensor, version: int) -> Tensor:
    """Returns the share of the current policy in the interpolated one: (v - 1 - u) / (v - u) for a
    token of version u, with v = `version`; 0 if u >= v, and for tokens that were not sampled.

    https://arxiv.org/abs/2512.06547, as in AReaL: the interpolated policy is one version older than
    the current one. Tokens of the two newest versions get the sampler's log-probs.
    """
    ages_T = (version - versions_T).double()
    shares_T = ((ages_T - 1) / ages_T.clamp(min=1)).clamp(min=0)
    return torch.where(versions_T >= 0, shares_T, torch.zeros_like(shares_T))


def token_covariances(logprobs_T: Tensor, advantages_T: Tensor, mask_T: Tensor) -> Tensor:
    """Each token's part of the covariance of log-probs and advantages over the batch, else 0.

    https://arxiv.org/abs/2505.22617, equation 8: where it is high, a step costs most entropy.
    """
    num = mask_T.sum().clamp(min=1)

    def centred(x_T: Tensor) -> Tensor:
        x_T = torch.where(mask_T, x_T, torch.zeros_like(x_T))
        return torch.where(mask_T, x_T - x_T.sum() / num, torch.zeros_like(x_T))

    return centred(logprobs_T) * centred(advantages_T)


def highest(x_T: Tensor, mask_T: Tensor, share: float) -> Tensor:
    """Selects the `share` of the masked tokens with the largest values; of equal ones the first."""
    num = int(share * int(mask_T.sum()))
    order_T = torch.where(mask_T, -x_T, torch.inf).sort(stable=True).indices
    return torch.zeros_like(mask_T).index_fill(0, order_T[:num], True)


def drawn_from(among_T: Tensor, num: int, seed: int) -> Tensor:
    """Selects at most `num` of the tokens at random; the selection depends only on the seed."""
    found_N = among_T.nonzero().squeeze(1)
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randperm(found_N.numel(), generator=generator)[:num]
    return torch.zeros_like(among_T).index_fill(0, found_N[picked], True)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """The trained tokens' weights, 0 elsewhere, and each sample's share of the count."""

    weights_T: Tensor
    counts_S: Tensor


def normalise(
    loss_norm: LossNorm, mask_T: Tensor, samples_T: Tensor, groups_S: Tensor, *, max_new_tokens: int
) -> Normalisation:
    mask = mask_T.double()
    num_S = mask.new_zeros(groups_S.numel()).index_add(0, samples_T, mask)
    is_trained_S = (num_S > 0).double()
    if loss_norm == "token":
        return Normalisation(mask, num_S)
    if loss_norm == "sequence":
        return Normalisation(mask / num_S.clamp(min=1)[samples_T], is_trained_S)
    if loss_norm == "constant":
        return Normalisation(mask / max_new_tokens, is_trained_S)
    labels, index_S = torch.unique(groups_S, return_inverse=True)
    num_G = mask.new_zeros(labels.numel()).index_add(0, index_S, num_S).clamp(min=1)
    return Normalisation(mask / num_G[index_S][samples_T], num_S / num_G[index_S])
