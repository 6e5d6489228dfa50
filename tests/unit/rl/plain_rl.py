"""The formulas of pentad.rl once more, as plain loops over samples and tokens, for the tests.

Written from the papers, on Python lists and scalars; shares no code with the package.
"""

import math
import statistics
from dataclasses import dataclass, field

import torch


@dataclass
class Plain:
    """One sample: everything token-aligned is a list over its tokens."""

    group: int
    reward: float
    mask: list[bool]
    token_rewards: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def steps(self):
        """Indices of the sampled tokens."""
        return [t for t, sampled in enumerate(self.mask) if sampled]


def total(sample):
    return sample.reward + sum(sample.token_rewards[t] for t in sample.steps)


def members(samples, group):
    return [total(s) for s in samples if s.group == group]


def constant(sample, advantage):
    return [advantage if sampled else 0.0 for sampled in sample.mask]


def grpo(samples):
    out = []
    for sample in samples:
        rewards = members(samples, sample.group)
        if len(set(rewards)) == 1:
            out.append(constant(sample, 0.0))
            continue
        mean, std = statistics.mean(rewards), statistics.stdev(rewards)
        equal = len({s.reward for s in samples if s.group == sample.group}) == 1
        divisor = max(std + 1e-6, 1.0) if equal else std + 1e-6
        out.append(constant(sample, (total(sample) - mean) / divisor))
    return out


def dr_grpo(samples):
    means = {s.group: statistics.mean(members(samples, s.group)) for s in samples}
    return [constant(s, total(s) - means[s.group]) for s in samples]


def rloo(samples):
    out = []
    for i, sample in enumerate(samples):
        others = [total(s) for j, s in enumerate(samples) if s.group == sample.group and j != i]
        out.append(constant(sample, total(sample) - statistics.mean(others) if others else 0.0))
    return out


def opo(samples):
    out = []
    for sample in samples:
        group = [s for s in samples if s.group == sample.group]
        rewards = [total(s) for s in group]
        weights = [len(s.steps) for s in group]
        if len(set(rewards)) == 1:
            out.append(constant(sample, 0.0))
            continue
        pairs = zip(weights, rewards, strict=True)
        baseline = sum(w * r for w, r in pairs) / max(1, sum(weights))
        out.append(constant(sample, total(sample) - baseline))
    return out


def gpg(samples):
    lively = [s for s in samples if len(set(members(samples, s.group))) > 1]
    alpha = len(samples) / max(1, len(lively))
    return [[alpha * a for a in row] for row in dr_grpo(samples)]


def lite_ppo(samples):
    rewards = [total(s) for s in samples]
    divisor = (statistics.stdev(rewards) if len(rewards) > 1 else 0.0) + 1e-6
    if len({s.reward for s in samples}) == 1:
        divisor = max(divisor, 1.0)
    out = []
    for sample, row in zip(samples, dr_grpo(samples), strict=True):
        flat = len(set(members(samples, sample.group))) == 1
        out.append([0.0 if flat else a / divisor for a in row])
    return out


def reinforce_plus_plus_baseline(samples):
    centred = dr_grpo(samples)
    for i, sample in enumerate(samples):
        if len(set(members(samples, sample.group))) == 1:
            centred[i] = constant(sample, 0.0)
    return whiten(centred, samples)


def reinforce(samples):
    mean = statistics.mean(total(s) for s in samples)
    return [constant(s, total(s) - mean) for s in samples]


def remax(samples, baselines):
    """verl's: the rewards from a token on, minus the greedy reward, which has no KL penalty."""
    out = []
    for sample, baseline in zip(samples, baselines, strict=True):
        later, row = sample.reward, [0.0] * len(sample.mask)
        for t in reversed(sample.steps):
            later += sample.token_rewards[t]
            row[t] = later - baseline
        out.append(row)
    return out


def returns_to_go(sample, gamma, with_reward=True):
    out, steps = [0.0] * len(sample.mask), sample.steps
    for i, t in enumerate(steps):
        for k, u in enumerate(steps[i:]):
            out[t] += gamma**k * sample.token_rewards[u]
        if with_reward:
            out[t] += gamma ** (len(steps) - 1 - i) * sample.reward
    return out


def whiten(rows, samples):
    kept = [row[t] for row, s in zip(rows, samples, strict=True) for t in s.steps]
    if len(set(kept)) < 2:
        return [[0.0] * len(row) for row in rows]
    mean, divisor = statistics.fmean(kept), statistics.pstdev(kept) + 1e-6
    if len({s.reward for s in samples}) == 1:
        divisor = max(divisor, 1.0)
    return [
        [(x - mean) / divisor if sampled else 0.0 for x, sampled in zip(r, s.mask, strict=True)]
        for r, s in zip(rows, samples, strict=True)
    ]


def reinforce_plus_plus(samples, gamma):
    return whiten([returns_to_go(s, gamma) for s in samples], samples)


def gae(sample, gamma, lam):
    """(advantages, returns) by the backward recursion."""
    advantages, returns = [0.0] * len(sample.mask), [0.0] * len(sample.mask)
    next_value = next_advantage = 0.0
    for i, t in enumerate(reversed(sample.steps)):
        reward = sample.token_rewards[t] + (sample.reward if i == 0 else 0.0)
        delta = reward + gamma * next_value - sample.values[t]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = sample.values[t]
        advantages[t], returns[t] = next_advantage, next_advantage + next_value
    return advantages, returns


def exp(x):
    """Of a 0-dim tensor, within the range that the package promises."""
    return torch.exp(torch.clamp(x, -20.0, 20.0))


def bounded(ratio, low, high):
    return torch.clamp(ratio, 1 - low, 1 + high)


def ppo_term(ratio, advantage, low, high, dual=None):
    term = -torch.minimum(ratio * advantage, bounded(ratio, low, high) * advantage)
    if dual is not None and advantage < 0:
        term = torch.minimum(term, -dual * advantage)
    return term


def sapo_term(ratio, advantage, tau_pos, tau_neg):
    tau = tau_pos if advantage > 0 else tau_neg
    return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage


def gmpo_term(logs, advantage, low, high):
    """One term for a sequence, from the log-ratios of its tokens."""
    sign = float(torch.sign(advantage))
    kept = [sign * torch.minimum(sign * x, sign * torch.clamp(x, -low, high)) for x in logs]
    return -exp(sum(kept) / len(kept)) * advantage


def kl_term(d, estimator):
    """(value, what to differentiate) for one token."""
    d = torch.clamp(d, -20.0, 20.0)
    edge = -math.log(11.0)  # where k3 has the slope -10; from there on the tangent
    k3 = torch.exp(-d) - 1 + d if d >= edge else 10 + edge - 10 * (d - edge)
    return {"k1": (d, d * d / 2), "k2": (d * d / 2, d * d / 2), "k3": (k3, k3)}[estimator]


def correction_weight(log_ratios, i, kind, level, cap, floor):
    """For the i-th of one sequence's trained tokens, whose log p/b are given."""
    log = {
        "token": log_ratios[i],
        "sequence": sum(log_ratios),
        "geometric": sum(log_ratios) / len(log_ratios),
    }[level]
    ratio = math.exp(max(-20.0, min(20.0, log)))
    if kind == "tis":
        return min(max(ratio, floor), cap)
    return ratio if floor <= ratio <= cap else 0.0


def binary_kl(logp, logq):
    """The larger divergence between (p, 1 - p) and (q, 1 - q), of numbers."""
    p, q = math.exp(logp), math.exp(logq)
    other = math.log(max(1 - p, 1e-6) / max(1 - q, 1e-6))
    one_way = p * (logp - logq) + max(1 - p, 1e-6) * other
    return max(one_way, q * (logq - logp) - max(1 - q, 1e-6) * other)


# verl's rollout correction (docs/algo/rollout_corr.md), per token, on 0-dim tensors.


def verl_weight(logs, i, level, cap):
    """Truncated importance weight of the i-th token, from log p - log sampler of its sequence."""
    log = logs[i] if level == "token" else sum(logs)
    return min(math.exp(max(-20.0, min(20.0, float(log)))), cap)


def verl_vanilla(logprob, old, advantage, low, high, dual):
    """Its PPO loss: the larger of two terms, and where A < 0 at most that of the dual clip."""
    ratio = torch.exp(torch.clamp(logprob - old, -20.0, 20.0))
    plain, near = -advantage * ratio, -advantage * torch.clamp(ratio, 1 - low, 1 + high)
    larger = torch.maximum(plain, near)
    return torch.minimum(larger, -advantage * dual) if advantage < 0 else larger


def verl_bypass(logprob, sampler, advantage, low, high, dual):
    """bypass_mode, loss_type ppo_clip: the old log-probs are the sampler's, and no weight."""
    return verl_vanilla(logprob, sampler, advantage, low, high, dual)


def verl_bypass_reinforce(logprob, advantage, weight):
    """bypass_mode, loss_type reinforce: the weight is of the current policy over the sampler's."""
    return -weight * advantage * logprob


def areal_proximal(drawn, logprob, version, current):
    """AReaL's log-linear old log-prob: the policy of version current - 1, between two others."""
    if version >= current:
        return drawn
    alpha = min(1.0, max(0.0, (current - 1 - version) / (current - version)))
    return drawn + alpha * (logprob - drawn)


def verl_decoupled(logprob, old, advantage, low, high, dual, weight):
    """Three policies: the clip around the recomputed one, its weight over the sampler's beside."""
    return weight * verl_vanilla(logprob, old, advantage, low, high, dual)
