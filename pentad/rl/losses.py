"""Losses: sums of per-token terms over a microbatch, weighted by the `weights` column.

Nothing here divides by a number of tokens, sequences or groups: that is folded into the weights
(`normalise`), and the learner divides once by the summed count. A token is trained if its weight is
not 0; values at other tokens (also inf and NaN) affect neither value nor gradient. A trained token
that is impossible under the policy (below MIN_LOGPROB) has a finite value and no gradient.

The ratio r = exp(logprobs - old). Old log-probs are the column `actor_logprobs` if rows have it. A
batch with one optimizer step needs none: the differentiated policy is the old one, so r is exactly
1. The sampler's log-probs are used only by the correction, as a weight or (sampler_ratio) in place
of the old ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.types import Segments, TokenOutputs
from pentad.rl.facts import ProximalMethod
from pentad.rl.kl import (
    clamp_log_ratio,
    correction_weights,
    estimate_kl,
    masked_difference,
    sequence_means,
)
from pentad.rl.section import Clip, Correction, KlEstimator

MIN_LOGPROB = -100.0
"""Lower bound of the policy's log-probs: no sampler draws a token of probability exp(-100)."""


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """The inputs of a surrogate for a microbatch."""

    logprobs_T: Tensor
    """The policy's log-probs, with gradient."""
    old_logprobs_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    segments: Segments

    @property
    def raw_log_ratio_T(self) -> Tensor:
        return masked_difference(self.logprobs_T, self.old_logprobs_T, self.mask_T)


Surrogate = Callable[[PolicyInputs, Clip], tuple[Tensor, Tensor]]
"""Returns the loss term per token (unweighted), and whether the clip was active."""


def clipped(inputs: PolicyInputs, clip: Clip) -> tuple[Tensor, Tensor]:
    """PPO: -min(r A, clamp(r, 1 - low, 1 + high) A), per token.

    https://arxiv.org/abs/1707.06347. high > low is clip-higher (DAPO, https://arxiv.org/abs/2503.14476).
    Dual clip (https://arxiv.org/abs/1912.09729): where A < 0 the loss is at most dual * |A|.
    """
    return _clip_ratio(clamp_log_ratio(inputs.raw_log_ratio_T).exp(), inputs.advantages_T, clip)


def sequence_clipped(inputs: PolicyInputs, clip: Clip) -> tuple[Tensor, Tensor]:
    """GSPO: the clipped objective with the sequence's ratio s = exp(mean_t log r_t).

    https://arxiv.org/abs/2507.18071, in its token form: the value is s for every
    token, the gradient of token t is s * grad log p_t. With one advantage and one weight per
    sequence this is the gradient of s A; it needs no gradient through sums over the sequence.
    """
    log_ratio_T = inputs.raw_log_ratio_T.detach()
    mean_T = sequence_means(log_ratio_T, inputs.mask_T, inputs.segments)
    own_T = masked_difference(inputs.logprobs_T, inputs.logprobs_T.detach(), inputs.mask_T)
    return _clip_ratio(clamp_log_ratio(mean_T + own_T).exp(), inputs.advantages_T, clip)


def weight_clipped(inputs: PolicyInputs, clip: Clip) -> tuple[Tensor, Tensor]:
    """CISPO: -stop_gradient(clamp(r, 1 - low, 1 + high)) A log p, per token.

    https://arxiv.org/abs/2506.13585. No token loses its gradient. low >= 1 means no lower bound,
    which is how the paper runs it.
    """
    ratio_T = clamp_log_ratio(inputs.raw_log_ratio_T).exp().detach()
    bounded_T = ratio_T.clamp(max(1 - clip.low, 0.0), 1 + clip.high)
    loss_T = -bounded_T * inputs.advantages_T * _masked(inputs.logprobs_T, inputs.mask_T)
    return loss_T, bounded_T != ratio_T


def gated(inputs: PolicyInputs, clip: Clip) -> tuple[Tensor, Tensor]:
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, per token; tau_pos where A > 0, else tau_neg.

    https://arxiv.org/abs/2511.20347. At r = 1 the gradient is that of r A; it decreases smoothly to
    both sides. No token is clipped.
    """
    ratio_T, advantages_T = clamp_log_ratio(inputs.raw_log_ratio_T).exp(), inputs.advantages_T
    tau_T = torch.full_like(ratio_T, clip.tau_neg).masked_fill(advantages_T > 0, clip.tau_pos)
    loss_T = -4 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1)) * advantages_T
    return loss_T, torch.zeros_like(inputs.mask_T)


def geometric_clipped(inputs: PolicyInputs, clip: Clip) -> tuple[Tensor, Tensor]:
    """GMPO: -exp(mean_t l_t) A with l_t = log r_t, bounded in the direction of A: at most `high` if
    A > 0, at least -`low` if A < 0.

    https://arxiv.org/abs/2507.20673, in the token form of `sequence_clipped`: every token has the
    value of the sequence, and a clipped token has no gradient of its own.
    """
    advantages_T, log_ratio_T = inputs.advantages_T, inputs.raw_log_ratio_T.detach()
    is_clipped_T = ((advantages_T > 0) & (log_ratio_T > clip.high)) | (
        (advantages_T < 0) & (log_ratio_T < -clip.low)
    )
    bounded_T = torch.where(is_clipped_T, log_ratio_T.clamp(-clip.low, clip.high), log_ratio_T)
    mean_T = sequence_means(bounded_T, inputs.mask_T, inputs.segments)
    own_T = masked_difference(
        inputs.logprobs_T, inputs.logprobs_T.detach(), inputs.mask_T & ~is_clipped_T
    )
    ratio_T = clamp_log_ratio(mean_T + own_T).exp()
    loss_T, is_dual_T = _clip_ratio(ratio_T, advantages_T, Clip(math.inf, math.inf, clip.dual))
    return loss_T, is_clipped_T | is_dual_T


def unbounded(inputs: PolicyInputs, clip: Clip) -> tuple[Tensor, Tensor]:
    """-r A without a band, for algorithms that bound the ratio otherwise: M2PO's choice of tokens
    (https://arxiv.org/abs/2510.01161), KL-Cov's penalty (https://arxiv.org/abs/2505.22617)."""
    ratio_T = clamp_log_ratio(inputs.raw_log_ratio_T).exp()
    return _clip_ratio(ratio_T, inputs.advantages_T, Clip(math.inf, math.inf, clip.dual))


def unclipped(inputs: PolicyInputs, clip: Clip) -> tuple[Tensor, Tensor]:
    """REINFORCE: -A log p, no ratio at all.  https://doi.org/10.1007/BF00992696"""
    loss_T = -inputs.advantages_T * _masked(inputs.logprobs_T, inputs.mask_T)
    return loss_T, torch.zeros_like(inputs.mask_T)


def _clip_ratio(ratio_T: Tensor, advantages_T: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    # The min of the formula, as the cases in which the clamped side is smaller: ties
    # then have one gradient, and the mask of clipped tokens is known.
    is_clipped_T = ((advantages_T > 0) & (ratio_T > 1 + clip.high)) | (
        (advantages_T < 0) & (ratio_T < 1 - clip.low)
    )
    bounded_T = ratio_T.clamp(1 - clip.low, 1 + clip.high).detach()
    if clip.dual is not None:
        is_dual_T = (advantages_T < 0) & (ratio_T > clip.dual)
        bounded_T = torch.where(is_dual_T, torch.full_like(bounded_T, clip.dual), bounded_T)
        is_clipped_T = is_clipped_T | is_dual_T
    return -torch.where(is_clipped_T, bounded_T, ratio_T) * advantages_T, is_clipped_T


def _masked(x_T: Tensor, mask_T: Tensor) -> Tensor:
    return torch.where(mask_T, x_T, torch.zeros_like(x_T))


def _weighted_sum(weights_T: Tensor, x_T: Tensor, mask_T: Tensor) -> Tensor:
    return (weights_T * _masked(x_T, mask_T)).sum()


class PolicyLoss:
    """surrogate * correction + kl_coef * KL(p || ref) - entropy_coef * entropy, per token.

    With `rejection` the surrogate is 0 for tokens whose policy is too far from the sampler's. With
    `kl_weighted` the KL term is multiplied by p over the sampler's probability, with its gradient,
    as in https://arxiv.org/abs/2512.02556: for k3 this gives the unbiased value and gradient of
    KL(p || ref). With `cov_kl_coef` tokens of the column `penalised` also cost |log p - log old|.
    """

    def __init__(
        self,
        surrogate: Surrogate,
        *,
        clip: Clip,
        correction: Correction,
        kl_coef: float = 0.0,
        kl_estimator: KlEstimator = "k3",
        kl_weighted: bool = False,
        entropy_coef: float = 0.0,
        rejection: Correction | None = None,
        cov_kl_coef: float = 0.0,
        needs_old_logprobs: bool = False,
        has_ratio: bool = True,
        proximal: ProximalMethod = "recompute",
    ) -> None:
        """`has_ratio`: whether the surrogate uses the ratio of the policy to the old one.
        `proximal`: with loglinear, the old log-probs are interpolated; with metrics, their distance
        from interpolated ones is reported."""
        self.surrogate = surrogate
        self.has_ratio = has_ratio
        self.proximal: ProximalMethod = proximal
        self.clip = clip
        self.correction = correction
        self.kl_coef = kl_coef
        self.kl_estimator: KlEstimator = kl_estimator
        self.kl_weighted = kl_weighted and kl_coef != 0
        self.rejection = rejection
        self.cov_kl_coef = cov_kl_coef
        self.entropy_coef = entropy_coef
        self.needs_entropy = entropy_coef != 0
        wanted = {
            "weights": True,
            "advantages": True,
            "actor_logprobs": needs_old_logprobs,
            "rollout_logprobs": correction.kind != "none"
            or rejection is not None
            or self.kl_weighted
            or proximal != "recompute",
            "proximal_share": proximal != "recompute",
            "ref_logprobs": kl_coef != 0,
            "penalised": cov_kl_coef != 0,
        }
        self.columns: tuple[str, ...] = tuple(name for name in wanted if wanted[name])

    def __call__(
        self, outputs: TokenOutputs, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _require(self.columns, columns, "the policy loss")
        weights_T, logprobs_T = columns["weights"], outputs.logprobs_T.clamp(min=MIN_LOGPROB)
        mask_T = weights_T != 0
        old_T = self._old(columns, logprobs_T)
        advantages_T = _masked(columns["advantages"], mask_T)
        inputs = PolicyInputs(logprobs_T, old_T, advantages_T, mask_T, outputs.segments)
        policy_T, is_clipped_T = self.surrogate(inputs, self.clip)
        stats = {"tokens": mask_T.sum(), "clipped_tokens": (is_clipped_T & mask_T).sum()}
        if self.correction.weighs:
            factor_T, outside_T = correction_weights(
                old_T, columns["rollout_logprobs"], mask_T, outputs.segments, self.correction
            )
            policy_T = policy_T * factor_T
            stats["corrected_tokens"] = outside_T.sum()
            stats["correction_weight"] = _masked(factor_T, mask_T).sum()
        if self.proximal == "metrics":
            error_T = self._interpolated(columns, logprobs_T) - columns["actor_logprobs"]
            stats["proximal_error"] = _masked(error_T.abs(), mask_T).sum()
        if self.rejection is not None:
            kept_T, rejected_T = self._kept(columns, logprobs_T, mask_T, outputs.segments)
            policy_T = policy_T * kept_T
            stats["rejected_tokens"] = rejected_T.sum()
        if self.cov_kl_coef:
            moved_T = clamp_log_ratio(inputs.raw_log_ratio_T).abs()
            policy_T = policy_T + self.cov_kl_coef * _masked(columns["penalised"], mask_T) * moved_T
        loss = _weighted_sum(weights_T, policy_T, mask_T)
        stats["policy_loss"] = loss.detach()
        if self.kl_coef:
            kl_T = estimate_kl(logprobs_T, columns["ref_logprobs"], mask_T, self.kl_estimator)
            if self.kl_weighted:
                drawn_T = columns["rollout_logprobs"]
                ratio_T = clamp_log_ratio(masked_difference(logprobs_T, drawn_T, mask_T)).exp()
                kl_T = kl_T * ratio_T
            kl = _weighted_sum(weights_T, kl_T, mask_T)
            loss = loss + self.kl_coef * kl
            stats["kl_loss"] = kl.detach()
        if self.entropy_coef:
            assert outputs.entropy_T is not None, "an entropy bonus needs the model's entropy"
            entropy = _weighted_sum(weights_T, outputs.entropy_T, mask_T)
            loss = loss - self.entropy_coef * entropy
            stats["entropy_loss"] = entropy.detach()
        return loss, stats

    def _kept(
        self, columns: Mapping[str, Tensor], logprobs_T: Tensor, mask_T: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor]:
        """Per token 0 if rejected, else 1, and a mask of rejected tokens. Compares the sampler with
        the policy at the start of the batch, or the present one if these are equal."""
        assert self.rejection is not None
        proximal_T = self._proximal(columns, logprobs_T)
        drawn_T = columns["rollout_logprobs"]
        _, outside_T = correction_weights(proximal_T, drawn_T, mask_T, segments, self.rejection)
        return (~outside_T).to(logprobs_T.dtype), outside_T

    def _old(self, columns: Mapping[str, Tensor], logprobs_T: Tensor) -> Tensor:
        """Returns the denominator of the ratio: without old log-probs the policy itself, so that
        the correction covers the whole difference between policy and sampler."""
        if not self.has_ratio:
            return logprobs_T.detach()
        if self.correction.kind == "sampler_ratio":
            return columns["rollout_logprobs"].detach()
        return self._proximal(columns, logprobs_T)

    def _proximal(self, columns: Mapping[str, Tensor], logprobs_T: Tensor) -> Tensor:
        """Returns the log-probs of the policy at the start of the batch; without old log-probs it
        is the present one."""
        if self.proximal == "loglinear":
            return self._interpolated(columns, logprobs_T)
        return columns.get("actor_logprobs", logprobs_T).detach()

    def _interpolated(self, columns: Mapping[str, Tensor], logprobs_T: Tensor) -> Tensor:
        drawn_T = columns["rollout_logprobs"]
        return drawn_T + columns["proximal_share"] * (logprobs_T.detach() - drawn_T)


class ValueLoss:
    """value_coef / 2 * max((V - R)^2, (V_old + clamp(V - V_old, -eps, eps) - R)^2), per token.

    The clipped form of PPO's reference code, https://arxiv.org/abs/2005.12729; plain squares
    without `eps_clip_value`. The old values are the `values` column.
    """

    needs_entropy = False

    def __init__(self, *, value_coef: float = 1.0, eps_clip_value: float | None = None) -> None:
        self.value_coef = value_coef
        self.eps_clip_value = eps_clip_value
        old = () if eps_clip_value is None else ("values",)
        self.columns: tuple[str, ...] = ("weights", "returns", *old)

    def __call__(
        self, outputs: TokenOutputs, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _require(self.columns, columns, "the value loss")
        assert outputs.values_T is not None, "the value loss needs a model with a value head"
        weights_T = columns["weights"]
        mask_T = weights_T != 0
        error_T = masked_difference(outputs.values_T, columns["returns"], mask_T)
        is_clipped_T = torch.zeros_like(mask_T)
        if self.eps_clip_value is not None:
            moved_T = masked_difference(outputs.values_T, columns["values"], mask_T)
            bounded_T = moved_T.clamp(-self.eps_clip_value, self.eps_clip_value)
            clipped_T = (error_T - moved_T + bounded_T).detach()
            is_clipped_T = (bounded_T != moved_T) & (clipped_T.abs() > error_T.abs())
            error_T = torch.where(is_clipped_T, clipped_T, error_T)
        loss = self.value_coef * _weighted_sum(weights_T, error_T.square() / 2, mask_T)
        stats = {
            "value_tokens": mask_T.sum(),
            "value_clipped_tokens": is_clipped_T.sum(),
            "value_loss": loss.detach(),
        }
        return loss, stats


class SftLoss:
    """Cross entropy: -log p(token), per token."""

    needs_entropy = False
    columns: tuple[str, ...] = ("weights",)

    def __call__(
        self, outputs: TokenOutputs, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _require(self.columns, columns, "the cross entropy")
        weights_T = columns["weights"]
        mask_T = weights_T != 0
        loss = -_weighted_sum(weights_T, outputs.logprobs_T, mask_T)
        return loss, {"tokens": mask_T.sum(), "nll": loss.detach()}


class RewardLoss:
    """The negative value per token; with the slopes of a loss as weights it has the gradient of
    that loss."""

    needs_entropy = False
    columns: tuple[str, ...] = ("weights",)

    def __call__(
        self, outputs: TokenOutputs, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _require(self.columns, columns, "the loss of a reward model")
        assert outputs.values_T is not None, "a reward model has a value head"
        weights_T = columns["weights"]
        mask_T = weights_T != 0
        return -_weighted_sum(weights_T, outputs.values_T, mask_T), {"tokens": mask_T.sum()}


def _require(names: tuple[str, ...], columns: Mapping[str, Tensor], reader: str) -> None:
    missing = [name for name in names if name not in columns]
    if missing:
        raise RunError(f"{reader} reads the column {missing[0]}, which the rows lack")
