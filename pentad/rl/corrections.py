"""Corrections for data drawn by another policy than the one the gradient is taken at.

With behaviour b (the sampler's `rollout_logprobs`) and proximal policy p (the one the loss's own
ratio is taken against: the trainer's log-probs at the start of the update; where the loss has no
ratio, the policy that is differentiated), the ratio p/b weighs each token's loss:

    token      w_t = p_t / b_t
    sequence   w_t = prod_u p_u / b_u            over the trained tokens u of the sequence
    geometric  w_t = (prod_u p_u / b_u)^(1/n)

    tis        clamp(w, floor, cap)              https://fengyao.notion.site/off-policy-rl
    mis        w if floor <= w <= cap else 0     https://arxiv.org/abs/2510.18855 (IcePop, token)

    sampler_ratio  no weight: the loss's own ratio is taken against b, so its clip bounds the whole
                   distance from the sampler. https://arxiv.org/abs/1707.06347 read literally;
                   verl's bypass mode, AReaL without its decoupled loss, slime's rollout log-probs.

Decoupled PPO (https://arxiv.org/abs/2110.00641) is the weight times the clipped objective whose
ratio is taken against p. Ours always bounds the weight, and weighs the policy term only; the KL and
entropy terms keep weight 1. Rejected tokens stay in the count that divides the loss, so rejecting
never enlarges the rest. Weights carry no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pentad.core.algorithms import Correction
from pentad.core.types import Segments
from pentad.rl.kl import clamp_log_ratio, masked_difference


def sequence_means(x_T: Tensor, mask_T: Tensor, segments: Segments) -> Tensor:
    """Each token gets the mean of x over the trained tokens of its sequence; x is 0 elsewhere."""
    num_S = segments.sum(mask_T.to(x_T.dtype)).clamp(min=1)
    return segments.spread(segments.sum(x_T) / num_S)


def correction_weights(
    proximal_T: Tensor,
    behaviour_T: Tensor,
    mask_T: Tensor,
    segments: Segments,
    correction: Correction,
) -> tuple[Tensor, Tensor]:
    """Per token the weight, and whether the ratio was outside [floor, cap]; 1 off the mask."""
    log_T = masked_difference(proximal_T, behaviour_T, mask_T).detach()
    if correction.level == "sequence":
        log_T = segments.spread(segments.sum(log_T))
    elif correction.level == "geometric":
        log_T = sequence_means(log_T, mask_T, segments)
    ratio_T = clamp_log_ratio(log_T).exp()
    outside_T = mask_T & ((ratio_T > correction.cap) | (ratio_T < correction.floor))
    if correction.kind == "mis":
        weights_T = torch.where(outside_T, torch.zeros_like(ratio_T), ratio_T)
    else:
        weights_T = ratio_T.clamp(correction.floor, correction.cap)
    return torch.where(mask_T, weights_T, torch.ones_like(weights_T)), outside_T
