"""Losses of preference training: DPO, IPO, KTO, and that of reward models.

These losses couple sequences that may be in different microbatches or on different ranks. They
depend on the policy only through the log-prob of each sequence, so a step has two passes: the first
computes the log-probs, from which these functions compute one slope per sequence, dL / d logprob;
the second trains every token with its sequence's slope as weight (`SftLoss`). The gradient is that
of the coupled loss, for any layout and any microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pentad.rl.section import PreferenceConfig


@dataclass(frozen=True, slots=True)
class AnswerLogProbs:
    """Log-probs of sequences, summed over their trained tokens; float64 arrays of one length."""

    policy: np.ndarray
    reference: np.ndarray
    lengths: np.ndarray
    """Number of trained tokens of each."""

    def __getitem__(self, places: slice | np.ndarray) -> AnswerLogProbs:
        return AnswerLogProbs(self.policy[places], self.reference[places], self.lengths[places])

    @property
    def log_ratio(self) -> np.ndarray:
        return self.policy - self.reference


@dataclass(frozen=True, slots=True)
class Preferred:
    """Losses of comparisons, and their slopes."""

    losses: np.ndarray
    """One value for each pair (KTO: for each answer)."""
    slopes: np.ndarray
    """d(sum of losses) / d(log-prob of each sequence)."""
    chosen: np.ndarray
    """Rewards of preferred answers: a reward model's, or beta * (policy - reference)."""
    rejected: np.ndarray
    """Rewards of rejected answers."""
    divergence: float | None = None
    """KTO: the estimate of the divergence from the reference, per sequence."""

    @staticmethod
    def join(parts: Sequence[Preferred]) -> Preferred:
        known = [part.divergence for part in parts if part.divergence is not None]
        return Preferred(
            np.concatenate([part.losses for part in parts]),
            np.concatenate([part.slopes for part in parts]),
            np.concatenate([part.chosen for part in parts]),
            np.concatenate([part.rejected for part in parts]),
            sum(known) / len(known) if known else None,
        )


def pair_loss(scored: AnswerLogProbs, settings: PreferenceConfig) -> Preferred:
    """Computes DPO or IPO. `scored`: chosen, rejected, chosen, rejected, ..."""
    ratio = scored.log_ratio
    beta, smoothing = settings.beta, settings.label_smoothing
    if settings.loss == "ipo":  # https://arxiv.org/abs/2310.12036, means over tokens as TRL has it
        scale = 1 / np.maximum(scored.lengths, 1)
        margin = (ratio * scale)[0::2] - (ratio * scale)[1::2]
        losses = (margin - 1 / (2 * beta)) ** 2
        slope = 2 * (margin - 1 / (2 * beta))
    else:  # https://arxiv.org/abs/2305.18290; label smoothing: https://ericmitchell.ai/cdpo.pdf
        scale = np.ones_like(ratio)
        margin = beta * (ratio[0::2] - ratio[1::2])
        losses = (1 - smoothing) * softplus(-margin) + smoothing * softplus(margin)
        slope = beta * (sigmoid(margin) - (1 - smoothing))
    slopes = np.repeat(slope, 2) * scale
    slopes[1::2] *= -1
    return Preferred(losses, slopes, beta * ratio[0::2], beta * ratio[1::2])


def reward_loss(rewards: np.ndarray) -> Preferred:
    """Bradley and Terry's model of pairs, https://doi.org/10.2307/2334029: -log sigmoid of the
    margin. `rewards`: chosen, rejected, chosen, rejected, ..."""
    margin = rewards[0::2] - rewards[1::2]
    slopes = np.repeat(sigmoid(margin) - 1, 2)
    slopes[1::2] *= -1
    return Preferred(softplus(-margin), slopes, rewards[0::2], rewards[1::2])


def label_loss(
    scored: AnswerLogProbs,
    is_desired: np.ndarray,
    mismatched: AnswerLogProbs,
    settings: PreferenceConfig,
) -> Preferred:
    """KTO, https://arxiv.org/abs/2402.01306. `mismatched`: answers after other prompts, whose mean
    log-ratio (at least 0) estimates the divergence, without gradient."""
    divergence = max(0.0, float(mismatched.log_ratio.mean()))
    sign = np.where(is_desired, 1.0, -1.0)
    weight = np.where(is_desired, settings.desirable_weight, settings.undesirable_weight)
    value = sigmoid(settings.beta * sign * (scored.log_ratio - divergence))
    losses = weight * (1 - value)
    slopes = -weight * value * (1 - value) * settings.beta * sign
    rewards = settings.beta * scored.log_ratio
    return Preferred(losses, slopes, rewards[is_desired], rewards[~is_desired], divergence)


def preference_metrics(found: Preferred) -> dict[str, float | None]:
    """Returns the fields of a record. Accuracy and margin are defined for pairs, so not for KTO."""
    is_paired = found.divergence is None
    margins = found.chosen - found.rejected if is_paired else None
    return {
        "chosen_reward": _mean(found.chosen),
        "rejected_reward": _mean(found.rejected),
        "margin": None if margins is None else _mean(margins),
        "accuracy": None if margins is None else _mean(margins > 0),
        "divergence": found.divergence,
    }


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-softplus(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)), for any x."""
    found: np.ndarray = np.logaddexp(0.0, x)
    return found


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None
