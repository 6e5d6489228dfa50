"""The functions of algorithms; makes losses and learner rows from settings.

An algorithm consists of facts (`facts.py`), an advantage function and a surrogate; all else (KL,
entropy, corrections, normalisation, shaping) are settings that any algorithm can use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pentad.core.types import Group, Loss, Row
from pentad.rl import advantages as adv
from pentad.rl import losses
from pentad.rl.advantages import Advantages
from pentad.rl.ragged import Rollouts
from pentad.rl.rows import build_rows
from pentad.rl.section import AlgorithmConfig

AdvantageFunction = Callable[[Rollouts, AlgorithmConfig], Advantages]


def _group_relative(rollouts: Rollouts, settings: AlgorithmConfig) -> Advantages:
    return adv.group_relative(rollouts)


FUNCTIONS: dict[str, tuple[AdvantageFunction, losses.Surrogate]] = {
    "grpo": (_group_relative, losses.clipped),
    "dr_grpo": (lambda rollouts, s: adv.mean_only(rollouts), losses.clipped),
    "dapo": (_group_relative, losses.clipped),
    "rloo": (lambda rollouts, s: adv.leave_one_out(rollouts), losses.clipped),
    "reinforce": (lambda rollouts, s: adv.batch_mean_baseline(rollouts), losses.unclipped),
    "remax": (lambda rollouts, s: adv.greedy_baseline(rollouts), losses.unclipped),
    "reinforce_plus_plus": (
        lambda rollouts, s: adv.reinforce_plus_plus(rollouts, gamma=s.gamma),
        losses.clipped,
    ),
    "ppo": (
        lambda rollouts, s: adv.whitened_gae(rollouts, gamma=s.gamma, lam=s.lam),
        losses.clipped,
    ),
    "gspo": (_group_relative, losses.sequence_clipped),
    "cispo": (_group_relative, losses.weight_clipped),
    "sapo": (_group_relative, losses.gated),
    "gmpo": (_group_relative, losses.geometric_clipped),
    "icepop": (_group_relative, losses.clipped),
    "kpop": (_group_relative, losses.clipped),
    "m2po": (_group_relative, losses.unbounded),
    "opo": (lambda rollouts, s: adv.length_weighted(rollouts), losses.clipped),
    "gpg": (lambda rollouts, s: adv.centred_and_rescaled(rollouts), losses.unclipped),
    "lite_ppo": (lambda rollouts, s: adv.batch_scaled(rollouts), losses.clipped),
    "reinforce_plus_plus_baseline": (
        lambda rollouts, s: adv.centred_then_whitened(rollouts),
        losses.clipped,
    ),
    "clip_cov": (_group_relative, losses.clipped),
    "kl_cov": (_group_relative, losses.unbounded),
    "distill": (lambda rollouts, s: adv.distillation(rollouts, gamma=s.gamma), losses.clipped),
}
"""The advantage function and the surrogate of each entry of `FACTS`."""


def build_policy_loss(settings: AlgorithmConfig, *, num_updates: int = 1) -> Loss:
    """Builds the loss of the policy. `num_updates`: optimizer steps per batch; with several, rows
    need `actor_logprobs`, computed before the first, unless the ratio is taken against the sampler,
    they are interpolated, or there is no ratio."""
    kl_coef = settings.kl_coef if settings.kl_in == "loss" else 0.0
    return losses.PolicyLoss(
        FUNCTIONS[settings.name][1],
        clip=settings.clip,
        correction=settings.correction_settings,
        kl_coef=kl_coef,
        kl_estimator=settings.kl_estimator,
        kl_weighted=settings.kl_weighted,
        entropy_coef=settings.entropy_coef,
        rejection=settings.rejection_settings,
        cov_kl_coef=settings.cov_kl_coef if "cov_kl_coef" in settings.facts.own else 0.0,
        needs_old_logprobs=settings.needs_old_logprobs(num_updates),
        proximal=settings.prox_logp_method if settings.has_proximal(num_updates) else "recompute",
        has_ratio=settings.facts.ratio_level != "none",
    )


def build_value_loss(settings: AlgorithmConfig) -> Loss:
    """Builds the loss of the critic."""
    assert settings.facts.needs_critic, f"{settings.name} has no critic"
    return losses.ValueLoss(value_coef=settings.value_coef, eps_clip_value=settings.eps_clip_value)


def make_rows(
    groups: Sequence[Group],
    settings: AlgorithmConfig,
    *,
    max_new_tokens: int,
    compute_advantages: bool = True,
    version: int = 0,
) -> Sequence[Row]:
    """Makes learner rows of scored groups, one per sample, in order.

    With advantage scope "group" the groups may be any part of a batch; with "batch" they must be
    all of it. `max_new_tokens`: the maximum of sampled tokens per sample, over all its turns, used
    by the overlong penalty and the constant norm. `version`: that of the weights that train them.

    Columns: weights, advantages, rollout_logprobs; with a critic values and returns; and those of
    actor_logprobs, ref_logprobs, teacher_logprobs that the samples have. Without
    `compute_advantages` the samples must already have advantages (and returns).
    """
    compute = FUNCTIONS[settings.name][0] if compute_advantages else None
    return build_rows(groups, settings, compute, max_new_tokens=max_new_tokens, version=version)
