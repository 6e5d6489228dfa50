"""Advantages: the value of each sampled token, from rewards (and values) of finished samples.

Pure functions of flat ragged tensors, in the dtype of their inputs. Tokens that were not sampled
(prompt, environment) get 0 and are no time steps: the successor of a sampled token is the next
sampled token of its sample. The return of a sample is its reward plus the sum of its token rewards.

Scope: functions that compare samples of one group need only that group ("group"); those that
whiten, or take the mean over the batch, need all groups of the step ("batch").
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pentad.rl.ragged import Rollouts, group_stats

STD_EPS = 1e-6
"""Added to a standard deviation before dividing by it."""
MIN_STD = 1.0
"""Smallest divisor if all rewards are equal. Then only a penalty or the critic's noise varies and
must keep its scale: divided by its own deviation, noise of any size would become a signal."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages and returns per token; 0 for tokens that were not sampled."""

    advantages_T: Tensor
    returns_T: Tensor
    """The targets of the critic."""


def group_relative(rollouts: Rollouts) -> Advantages:
    """GRPO: A = (r - mean(group)) / (std(group) + eps).  https://arxiv.org/abs/2402.03300

    Ours: the unbiased std (n - 1), as in common implementations; exactly 0 if all rewards of the
    group are equal or the group has one sample. If only token rewards (the KL penalty) differ, they
    are not scaled up (MIN_STD).
    """
    total_S = rollouts.total_rewards()
    stats = group_stats(total_S, rollouts.groups_S)
    divisor_S = stats.std_S + STD_EPS
    if rollouts.token_rewards_T is not None:
        is_rewarded_S = group_stats(rollouts.rewards_S, rollouts.groups_S).has_signal_S
        divisor_S = torch.where(is_rewarded_S, divisor_S, divisor_S.clamp(min=MIN_STD))
    scaled_S = (total_S - stats.mean_S) / divisor_S
    return _per_sample(rollouts, total_S, torch.where(stats.has_signal_S, scaled_S, 0.0))


def mean_only(rollouts: Rollouts) -> Advantages:
    """Dr.GRPO: A = r - mean(group).  https://arxiv.org/abs/2503.20783

    No std, which would weight groups by difficulty. Exactly 0 for equal rewards.
    """
    total_S = rollouts.total_rewards()
    stats = group_stats(total_S, rollouts.groups_S)
    centred_S = torch.where(stats.has_signal_S, total_S - stats.mean_S, 0.0)
    return _per_sample(rollouts, total_S, centred_S)


def leave_one_out(rollouts: Rollouts) -> Advantages:
    """RLOO: A_i = r_i - mean(r_j, j != i) = (r_i - mean(group)) * n / (n - 1).

    https://arxiv.org/abs/2402.14740. Ours: a group of one sample has no baseline and gets 0.
    """
    total_S = rollouts.total_rewards()
    stats = group_stats(total_S, rollouts.groups_S)
    factor_S = stats.size_S / (stats.size_S - 1).clamp(min=1)
    left_S = torch.where(stats.has_signal_S, (total_S - stats.mean_S) * factor_S, 0.0)
    return _per_sample(rollouts, total_S, left_S)


def length_weighted(rollouts: Rollouts) -> Advantages:
    """OPO: A = r - sum(l_j r_j) / sum(l_j) over the group, l the sampled tokens of a sample.

    https://arxiv.org/abs/2505.23585: the baseline of least variance if the squared gradient of a
    sample is proportional to its length. Exactly 0 for equal rewards.
    """
    total_S = rollouts.total_rewards()
    stats = group_stats(total_S, rollouts.groups_S)
    lengths_S = rollouts.sum_tokens(torch.ones_like(rollouts.mask_T, dtype=total_S.dtype))
    _, index_S = torch.unique(rollouts.groups_S, return_inverse=True)
    zeros_S = torch.zeros_like(total_S)
    tokens_S = zeros_S.index_add(0, index_S, lengths_S)[index_S].clamp(min=1)
    baseline_S = zeros_S.index_add(0, index_S, lengths_S * total_S)[index_S] / tokens_S
    centred_S = torch.where(stats.has_signal_S, total_S - baseline_S, 0.0)
    return _per_sample(rollouts, total_S, centred_S)


def centred_and_rescaled(rollouts: Rollouts) -> Advantages:
    """GPG: A = alpha (r - mean(group)), alpha = samples / samples of groups with signal.

    https://arxiv.org/abs/2504.02546. The factor keeps the scale of the gradient if many groups of
    the batch have equal rewards and give none.
    """
    centred = mean_only(rollouts)
    has_signal_S = group_stats(rollouts.total_rewards(), rollouts.groups_S).has_signal_S
    alpha = rollouts.num_samples / max(1, int(has_signal_S.sum()))
    return Advantages(alpha * centred.advantages_T, centred.returns_T)


def batch_scaled(rollouts: Rollouts) -> Advantages:
    """Lite PPO: A = (r - mean(group)) / (std(batch) + eps).  https://arxiv.org/abs/2508.08221

    The unbiased std (n - 1) of all rewards of the batch, so that a group of nearly equal rewards is
    not scaled up. If all rewards are equal, token rewards are not scaled up either (MIN_STD).
    """
    centred, total_S = mean_only(rollouts), rollouts.total_rewards()
    std = group_stats(total_S, torch.zeros_like(rollouts.groups_S)).std_S + STD_EPS
    is_flat = rollouts.num_samples > 0 and rollouts.rewards_S.min() == rollouts.rewards_S.max()
    divisor_S = std.clamp(min=MIN_STD) if is_flat else std
    scaled_T = centred.advantages_T / divisor_S[rollouts.samples_T]
    return Advantages(scaled_T, centred.returns_T)


def centred_then_whitened(rollouts: Rollouts) -> Advantages:
    """REINFORCE++-baseline: r - mean(group), whitened over all sampled tokens of the batch.

    https://arxiv.org/abs/2501.03262
    """
    centred = mean_only(rollouts)
    return Advantages(_whitened(centred.advantages_T, rollouts), centred.returns_T)


def reinforce(rollouts: Rollouts, baseline_S: Tensor | None = None) -> Advantages:
    """REINFORCE: A = r - b, the same for all tokens of a sample; b = 0 without a baseline.

    Williams 1992, https://doi.org/10.1007/BF00992696
    """
    total_S = rollouts.total_rewards()
    return _per_sample(rollouts, total_S, total_S if baseline_S is None else total_S - baseline_S)


def batch_mean_baseline(rollouts: Rollouts) -> Advantages:
    """REINFORCE with the mean reward of the batch as baseline; exactly 0 for equal rewards.

    The mean includes the sample itself, which only shrinks the gradient by 1/S.
    """
    total_S = rollouts.total_rewards()
    one_group = group_stats(total_S, torch.zeros_like(rollouts.groups_S))
    return reinforce(rollouts, torch.where(one_group.has_signal_S, one_group.mean_S, total_S))


def greedy_baseline(rollouts: Rollouts) -> Advantages:
    """ReMax: A_t = r + sum_(k >= t) token rewards - r_greedy.  https://arxiv.org/abs/2310.10505

    As in verl, the baseline has no token rewards. It does not depend on the sample, so the gradient
    is unbiased, with one sample per prompt too.
    """
    assert rollouts.baselines_S is not None, "ReMax needs the rewards of greedy answers"
    returns_T = _discounted_returns(rollouts, 1.0)
    return Advantages(returns_T - rollouts.spread(rollouts.baselines_S), returns_T)


def reinforce_plus_plus(rollouts: Rollouts, *, gamma: float) -> Advantages:
    """REINFORCE++: G_t = sum_k gamma^k r_(t+k), whitened over all sampled tokens of the batch.

    https://arxiv.org/abs/2501.03262. The reward of the sample is at its last sampled token, token
    rewards (the KL penalty) at their tokens.
    """
    returns_T = _discounted_returns(rollouts, gamma)
    return Advantages(_whitened(returns_T, rollouts), returns_T)


def gae(rollouts: Rollouts, *, gamma: float, lam: float) -> Advantages:
    """GAE: d_t = r_t + gamma V_(t+1) - V_t;  A_t = d_t + gamma lam A_(t+1);  return = A_t + V_t.

    https://arxiv.org/abs/1506.02438. V after the last sampled token is 0, also for samples
    truncated at the length limit.
    """
    assert rollouts.values_T is not None, "GAE needs values"
    tokens = rollouts.sampled()
    values_N = rollouts.values_T[tokens.index_N]
    next_N = torch.where(tokens.is_last_N, torch.zeros_like(values_N), values_N.roll(-1))
    deltas_N = tokens.rewards_N + gamma * next_N - values_N
    advantages_N = tokens.discounted_sums(deltas_N, gamma * lam)
    return Advantages(tokens.scatter(advantages_N), tokens.scatter(advantages_N + values_N))


def whitened_gae(rollouts: Rollouts, *, gamma: float, lam: float) -> Advantages:
    """GAE with advantages whitened over the batch, as usual for PPO; returns are not whitened."""
    plain = gae(rollouts, gamma=gamma, lam=lam)
    return Advantages(_whitened(plain.advantages_T, rollouts), plain.returns_T)


def distillation(rollouts: Rollouts, *, gamma: float) -> Advantages:
    """On-policy distillation: A_t = sum_k gamma^k (log teacher - log student)_(t+k).

    The differences are token rewards (`shaping.teacher_rewards`); rewards of samples are ignored.
    With gamma = 0 each token counts alone: the score-function gradient of the per-token reverse
    KL(student || teacher). https://arxiv.org/abs/2306.13649 has the setting (on-policy data,
    reverse KL); ours uses only the sampled token, not the vocabulary.
    """
    assert rollouts.token_rewards_T is not None, "distillation needs a teacher's log-probs"
    judged = replace(rollouts, rewards_S=torch.zeros_like(rollouts.rewards_S))
    returns_T = _discounted_returns(judged, gamma)
    return Advantages(returns_T, returns_T)


def whiten(x_T: Tensor, mask_T: Tensor, *, min_std: float = 0.0) -> Tensor:
    """(x - mean) / (std + eps) over the masked tokens, 0 elsewhere; exactly 0 when all are equal.

    std divides by n, because it is a statistic of this batch, not an estimate. The divisor is at
    least `min_std`.
    """
    kept = x_T[mask_T]
    if kept.numel() == 0 or kept.min() == kept.max():
        return torch.zeros_like(x_T)
    divisor = (kept.std(correction=0) + STD_EPS).clamp(min=min_std)
    return torch.where(mask_T, (x_T - kept.mean()) / divisor, torch.zeros_like(x_T))


def _whitened(x_T: Tensor, rollouts: Rollouts) -> Tensor:
    """Whitens over the batch; does not scale up if all rewards are equal."""
    is_flat = rollouts.num_samples > 0 and rollouts.rewards_S.min() == rollouts.rewards_S.max()
    return whiten(x_T, rollouts.mask_T, min_std=MIN_STD if is_flat else 0.0)


def _discounted_returns(rollouts: Rollouts, gamma: float) -> Tensor:
    tokens = rollouts.sampled()
    return tokens.scatter(tokens.discounted_sums(tokens.rewards_N, gamma))


def _per_sample(rollouts: Rollouts, total_S: Tensor, advantages_S: Tensor) -> Advantages:
    return Advantages(rollouts.spread(advantages_S), rollouts.spread(total_S))
