"""Flat ragged batches of samples, and the sums over samples and groups that advantages need.

Shapes: T tokens of all samples, concatenated; N sampled tokens among them; S samples. All functions
keep the dtype of their inputs, also fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@torch.no_grad()
def cut(x_T: Tensor, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Returns one view per sample, without autograd, whose bookkeeping for views triples the
    time."""
    return x_T.split(list(lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Scored samples, flat. Example: two samples of one group, prompt [5 9], answers [7 2] and [3]:

    rewards_S [1. 0.], groups_S [0 0], samples_T [0 0 0 0 1 1 1], mask_T [0 0 1 1 0 0 1]
    """

    rewards_S: Tensor
    """One reward per sample, after shaping."""
    groups_S: Tensor
    """Group of each sample; any int64 labels."""
    mask_T: Tensor
    """bool: sampled by the policy."""
    samples_T: Tensor
    """int64, index into S; samples are concatenated, so it never decreases."""
    baselines_S: Tensor | None = None
    """Reward of the greedy answer to each sample's prompt, after shaping."""
    token_rewards_T: Tensor | None = None
    """Rewards of single tokens, such as a KL penalty; used only where the mask is True."""
    values_T: Tensor | None = None
    """values_T[t] is the critic's value of the state in which token t is sampled."""

    @property
    def num_samples(self) -> int:
        return self.rewards_S.numel()

    def sum_tokens(self, x_T: Tensor) -> Tensor:
        """Sums over the sampled tokens of each sample: [T] -> [S]."""
        kept_T = torch.where(self.mask_T, x_T, torch.zeros_like(x_T))
        return x_T.new_zeros(self.num_samples).index_add(0, self.samples_T, kept_T)

    def spread(self, x_S: Tensor) -> Tensor:
        """Gives each sampled token its sample's value, every other token 0: [S] -> [T]."""
        x_T = x_S[self.samples_T]
        return torch.where(self.mask_T, x_T, torch.zeros_like(x_T))

    def total_rewards(self) -> Tensor:
        """Returns the reward of each sample plus those of its tokens: [S]."""
        if self.token_rewards_T is None:
            return self.rewards_S
        return self.rewards_S + self.sum_tokens(self.token_rewards_T)

    def sampled(self) -> Sampled:
        """The sampled tokens only, each with its reward; a sample's reward is at its last token."""
        kept_N = self.mask_T.nonzero().squeeze(1)
        samples_N = self.samples_T[kept_N]
        is_last_N = torch.ones_like(samples_N, dtype=torch.bool)
        is_last_N[:-1] = samples_N[1:] != samples_N[:-1]
        zeros_N = self.rewards_S.new_zeros(kept_N.numel())
        rewards_N = torch.where(is_last_N, self.rewards_S[samples_N], zeros_N)
        if self.token_rewards_T is not None:
            rewards_N = rewards_N + self.token_rewards_T[kept_N]
        return Sampled(kept_N, samples_N, is_last_N, rewards_N, self.mask_T.numel())


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled tokens of a batch, compacted."""

    index_N: Tensor
    """Their positions among all tokens."""
    samples_N: Tensor
    is_last_N: Tensor
    """Whether no sampled token of the same sample follows."""
    rewards_N: Tensor
    num_tokens: int

    def scatter(self, x_N: Tensor) -> Tensor:
        """Writes values of sampled tokens to all tokens, 0 elsewhere: [N] -> [T]."""
        return x_N.new_zeros(self.num_tokens).index_copy(0, self.index_N, x_N)

    def discounted_sums(self, x_N: Tensor, decay: float) -> Tensor:
        """y[t] = x[t] + decay * y[t+1] within each sample, in log2(longest sample) vector steps.

        Doubling: if y contains sums over `reach` tokens, y[t] + decay^reach * y[t+reach] are sums
        over twice as many. There is no division by powers of the decay, so no overflow.
        """
        y_N, reach = x_N, 1
        longest = int(self.samples_N.bincount().max()) if x_N.numel() else 0
        while reach < longest:
            is_same = self.samples_N[reach:] == self.samples_N[:-reach]
            later = torch.where(is_same, y_N[reach:], torch.zeros_like(y_N[reach:]))
            y_N = torch.cat([y_N[:-reach] + decay**reach * later, y_N[-reach:]])
            reach *= 2
        return y_N


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Statistics of each sample's group; every field is [S]."""

    size_S: Tensor
    mean_S: Tensor
    std_S: Tensor
    """Unbiased (divided by n - 1); 0 for groups of one."""
    has_signal_S: Tensor
    """bool: not all values of the group are equal. Compares values, because the mean of equal
    numbers may have a rounding error that division by std would amplify."""


def group_stats(x_S: Tensor, groups_S: Tensor) -> GroupStats:
    labels, index_S = torch.unique(groups_S, return_inverse=True)
    zeros_G = x_S.new_zeros(labels.numel())
    size_S = zeros_G.index_add(0, index_S, torch.ones_like(x_S))[index_S]
    mean_S = zeros_G.index_add(0, index_S, x_S)[index_S] / size_S
    square_S = zeros_G.index_add(0, index_S, (x_S - mean_S) ** 2)[index_S]
    high_S = zeros_G.scatter_reduce(0, index_S, x_S, "amax", include_self=False)[index_S]
    low_S = zeros_G.scatter_reduce(0, index_S, x_S, "amin", include_self=False)[index_S]
    std_S = (square_S / (size_S - 1).clamp(min=1)).sqrt()
    return GroupStats(size_S, mean_S, std_S, high_S > low_S)
