"""Log-ratios without overflow: three estimators of a KL divergence, and importance weights.

Schulman's note: http://joschu.net/blog/kl-approx.html. For a token drawn from p, d = log p - log q:

    k1 = d                   unbiased, can be negative
    k2 = d^2 / 2             biased, small variance
    k3 = exp(-d) - 1 + d     unbiased, never negative

A good value and a good gradient differ (https://arxiv.org/abs/2506.09477). As a loss on tokens
drawn from p, the gradient of KL(p || q) is E[d * grad log p]:

    k1  differentiated literally is grad log p: zero in expectation, so it would do nothing. Ours
        has the value of k1 and the gradient d * grad log p.
    k2  d * grad log p: right as it is.
    k3  (1 - exp(-d)) * grad log p: the gradient of KL(q || p), the other direction; close to the
        right one while d is small. GRPO's paper uses it, so it is unchanged up to the slope
        MAX_K3_SLOPE (d = -2.4): below, it continues as a straight line.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pentad.core.types import Segments
from pentad.rl.section import Correction, KlEstimator

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this before exp: 4.8e8 squared does not overflow in fp32.
Beyond it a token has no gradient, which would be meaningless."""

MAX_K3_SLOPE = 10.0
"""Largest |1 - exp(-d)| of k3, whose gradient would reach 5e8 at d = -20. verl bounds the value by
10 instead, which leaves a token so far away without a gradient."""

LEAST_REST = 1e-6
"""Lower bound of the probability of all other tokens in `binary_kl`, since 1 - p has an error of
about 1e-7 in float32."""


def masked_difference(numerator_T: Tensor, denominator_T: Tensor, mask_T: Tensor) -> Tensor:
    """numerator - denominator where the mask is True, else 0 with gradient 0, also for NaN."""
    difference_T = numerator_T - denominator_T
    return torch.where(mask_T, difference_T, torch.zeros_like(difference_T))


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def estimate_kl(
    logprobs_T: Tensor, other_logprobs_T: Tensor, mask_T: Tensor, estimator: KlEstimator
) -> Tensor:
    """Per token KL(p || q) with p = exp(logprobs), q = exp(other_logprobs); 0 off the mask."""
    d_T = clamp_log_ratio(masked_difference(logprobs_T, other_logprobs_T, mask_T))
    if estimator == "k1":
        half_square_T = d_T.square() / 2
        return d_T.detach() + (half_square_T - half_square_T.detach())
    if estimator == "k2":
        return d_T.square() / 2
    near_T = d_T.clamp(min=-math.log1p(MAX_K3_SLOPE))
    return torch.expm1(-near_T) + near_T - MAX_K3_SLOPE * (d_T - near_T)


def sequence_means(x_T: Tensor, mask_T: Tensor, segments: Segments) -> Tensor:
    """Replaces each token's x by the mean over the trained tokens of its sequence; x is 0
    elsewhere."""
    num_S = segments.sum(mask_T.to(x_T.dtype)).clamp(min=1)
    return segments.spread(segments.sum(x_T) / num_S)


def binary_kl(logprobs_T: Tensor, log_ratio_T: Tensor, mask_T: Tensor) -> Tensor:
    """Per token the larger of KL(p || q) and KL(q || p) between the distributions "this token or
    another one" of two policies (KPop, https://ringtech.notion.site/kpop). `log_ratio_T`: log p -
    log q. Other tokens have a probability of at least `LEAST_REST`."""
    log_p_T = torch.where(mask_T, logprobs_T, torch.zeros_like(logprobs_T))
    p_T, q_T = log_p_T.exp(), (log_p_T - log_ratio_T).exp()
    rest_p_T, rest_q_T = (1 - p_T).clamp(min=LEAST_REST), (1 - q_T).clamp(min=LEAST_REST)
    rest_T = torch.log(rest_p_T) - torch.log(rest_q_T)
    forward_T = p_T * log_ratio_T + rest_p_T * rest_T
    return torch.maximum(forward_T, -q_T * log_ratio_T - rest_q_T * rest_T)


def correction_weights(
    proximal_T: Tensor,
    behaviour_T: Tensor,
    mask_T: Tensor,
    segments: Segments,
    correction: Correction,
) -> tuple[Tensor, Tensor]:
    """Returns per token the importance weight of the proximal policy (the denominator of the loss's
    ratio) over the sampling policy, and whether it was outside [floor, cap]; 1 outside the mask."""
    log_T = masked_difference(proximal_T, behaviour_T, mask_T).detach()
    if correction.level == "sequence":
        log_T = segments.spread(segments.sum(log_T))
    elif correction.level == "geometric":
        log_T = sequence_means(log_T, mask_T, segments)
    ratio_T = clamp_log_ratio(log_T).exp()
    if correction.level == "binary_kl":
        outside_T = mask_T & (binary_kl(proximal_T.detach(), log_T, mask_T) > correction.cap)
    else:
        outside_T = mask_T & ((ratio_T > correction.cap) | (ratio_T < correction.floor))
    if correction.kind == "mis":
        weights_T = torch.where(outside_T, torch.zeros_like(ratio_T), ratio_T)
    else:
        weights_T = ratio_T.clamp(correction.floor, correction.cap)
    return torch.where(mask_T, weights_T, torch.ones_like(weights_T)), outside_T
