"""The table of algorithms, and the way from a name to settings, losses and learner rows.

An algorithm is an advantage function, a surrogate and defaults; everything else (KL, entropy,
corrections, normalisation, shaping) is a setting that any of them can turn on. Adding one is
adding an entry; `docs/algorithms.md` walks through it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.core.types import Group, Loss, Row
from pentad.rl import advantages as adv
from pentad.rl import losses
from pentad.rl.advantages import Advantages
from pentad.rl.ragged import Rollouts
from pentad.rl.rows import build_rows
from pentad.rl.settings import (
    AdvantageScope,
    AlgorithmSettings,
    RatioLevel,
    conflict_problems,
    override_problems,
    where,
)

AdvantageFunction = Callable[[Rollouts, AlgorithmSettings], Advantages]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One entry of the table."""

    text: str
    """One line for people."""
    paper: str
    """Link."""
    advantages: AdvantageFunction
    surrogate: losses.Surrogate
    scope: AdvantageScope
    """What the advantage function must see at once."""
    needs_critic: bool = False
    needs_teacher: bool = False
    min_group_size: int = 1
    """Fewer samples per prompt than this can carry no signal."""
    ratio_level: RatioLevel = "token"
    """Whose ratio the surrogate clips."""
    uses_gamma: bool = False
    """Whether the advantage function discounts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Tunables that differ from those of `AlgorithmSettings`."""


def _group_relative(rollouts: Rollouts, settings: AlgorithmSettings) -> Advantages:
    return adv.group_relative(rollouts)


def _gae(rollouts: Rollouts, settings: AlgorithmSettings) -> Advantages:
    return adv.whitened_gae(rollouts, gamma=settings.gamma, lam=settings.lam)


def _reinforce_plus_plus(rollouts: Rollouts, settings: AlgorithmSettings) -> Advantages:
    return adv.reinforce_plus_plus(rollouts, gamma=settings.gamma)


def _distillation(rollouts: Rollouts, settings: AlgorithmSettings) -> Advantages:
    return adv.distillation(rollouts, gamma=settings.gamma)


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        text="Group-relative advantages, clipped ratio, mean over samples of token means.",
        paper="https://arxiv.org/abs/2402.03300",
        advantages=_group_relative,
        surrogate=losses.clipped,
        scope="group",
        min_group_size=2,
        defaults={"loss_norm": "sequence"},
    ),
    "dr_grpo": Algorithm(
        text="GRPO without its length and difficulty biases: no std, a constant divisor.",
        paper="https://arxiv.org/abs/2503.20783",
        advantages=lambda rollouts, settings: adv.mean_only(rollouts),
        surrogate=losses.clipped,
        scope="group",
        min_group_size=2,
        defaults={"loss_norm": "constant"},
    ),
    "dapo": Algorithm(
        text="GRPO with clip-higher, token mean, overlong penalty and dynamic filtering.",
        paper="https://arxiv.org/abs/2503.14476",
        advantages=_group_relative,
        surrogate=losses.clipped,
        scope="group",
        min_group_size=2,
        defaults={
            "eps_clip_higher": 0.28,
            "loss_norm": "token",
            "dynamic_filter": True,
            "overlong_penalty": 1.0,
        },
    ),
    "rloo": Algorithm(
        text="Leave-one-out baseline; the clip only acts when a batch makes several updates.",
        paper="https://arxiv.org/abs/2402.14740",
        advantages=lambda rollouts, settings: adv.leave_one_out(rollouts),
        surrogate=losses.clipped,
        scope="group",
        min_group_size=2,
        defaults={"loss_norm": "constant", "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "reinforce": Algorithm(
        text="The plain policy gradient with the batch's mean reward as baseline.",
        paper="https://doi.org/10.1007/BF00992696",
        advantages=lambda rollouts, settings: adv.batch_mean_baseline(rollouts),
        surrogate=losses.unclipped,
        scope="batch",
        ratio_level="none",
        defaults={"loss_norm": "constant"},
    ),
    "reinforce_plus_plus": Algorithm(
        text="Per-token returns whitened over the whole batch; no critic, no groups needed.",
        paper="https://arxiv.org/abs/2501.03262",
        advantages=_reinforce_plus_plus,
        surrogate=losses.clipped,
        scope="batch",
        uses_gamma=True,
        defaults={"kl_in": "reward", "kl_estimator": "k1"},
    ),
    "ppo": Algorithm(
        text="A critic and generalised advantage estimation, whitened over the batch.",
        paper="https://arxiv.org/abs/1707.06347",
        advantages=_gae,
        surrogate=losses.clipped,
        scope="batch",
        needs_critic=True,
        uses_gamma=True,
        defaults={"lam": 0.95, "eps_clip_value": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "gspo": Algorithm(
        text="GRPO with one ratio per sequence, the geometric mean of its tokens' ratios.",
        paper="https://arxiv.org/abs/2507.18071",
        advantages=_group_relative,
        surrogate=losses.sequence_clipped,
        scope="group",
        min_group_size=2,
        ratio_level="sequence",
        defaults={"eps_clip": 3e-4, "eps_clip_higher": 4e-4, "loss_norm": "sequence"},
    ),
    "cispo": Algorithm(
        text="Clips the weight of a token, never its gradient; one-sided by default.",
        paper="https://arxiv.org/abs/2506.13585",
        advantages=_group_relative,
        surrogate=losses.weight_clipped,
        scope="group",
        min_group_size=2,
        defaults={"eps_clip": 1.0, "eps_clip_higher": 3.0, "loss_norm": "token"},
    ),
    "distill": Algorithm(
        text="On-policy distillation: a teacher's log-probs judge every sampled token.",
        paper="https://arxiv.org/abs/2306.13649",
        advantages=_distillation,
        surrogate=losses.clipped,
        scope="group",
        needs_teacher=True,
        uses_gamma=True,
        defaults={"gamma": 0.0, "reward_clip": 10.0},
    ),
}


def settings_for(name: str, **overrides: Any) -> AlgorithmSettings:
    """The settings of an algorithm, its defaults overridden by what is not None.

    Raises UserError with every problem: an unknown name, values out of range, overrides that
    contradict each other or that this algorithm would never read.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    if name not in ALGORITHMS:
        raise UserError(_unknown_algorithm(name))
    algorithm = ALGORITHMS[name]
    problems = list(override_problems(given))
    if problems:
        raise UserError(problems)
    settings = AlgorithmSettings(
        name=name,
        advantage_scope=algorithm.scope,
        needs_critic=algorithm.needs_critic,
        needs_teacher=algorithm.needs_teacher,
        min_group_size=algorithm.min_group_size,
        ratio_level=algorithm.ratio_level,
        **{**algorithm.defaults, **given},
    )
    if settings.decoupled and "correction" not in given:
        settings = replace(settings, correction="tis")
    problems = list(conflict_problems(settings, given, unused_settings(algorithm)))
    if problems:
        raise UserError(problems)
    return settings


def unused_settings(algorithm: Algorithm) -> dict[str, str]:
    """The tunables that an algorithm never reads, each with the reason."""
    unused: dict[str, str] = {}
    if algorithm.ratio_level == "none":
        for name in ("eps_clip", "eps_clip_higher", "c_clip", "decoupled"):
            unused[name] = "its loss has no ratio"
    if algorithm.surrogate is losses.weight_clipped:
        unused["c_clip"] = "its ratio is bounded on both sides of every advantage"
    if not algorithm.needs_critic:
        for name in ("lam", "value_coef", "eps_clip_value"):
            unused[name] = "it has no critic"
    if not algorithm.uses_gamma:
        unused["gamma"] = "it does not discount"
    if algorithm.min_group_size < 2:
        unused["dynamic_filter"] = "a group of equal rewards still carries signal"
    if algorithm.needs_teacher:
        for name in ("reward_scale", "max_reward", "overlong_penalty", "overlong_buffer"):
            unused[name] = "it learns from a teacher, not from rewards"
    return unused


def build_policy_loss(settings: AlgorithmSettings, *, num_updates: int = 1) -> Loss:
    """The loss of the policy; `num_updates` is the number of optimizer steps a batch makes.

    With several of them, rows must carry `actor_logprobs`, taken before the first, unless the
    ratio is taken against the sampler or there is none.
    """
    kl_coef = settings.kl_coef if settings.kl_in == "loss" else 0.0
    return losses.PolicyLoss(
        ALGORITHMS[settings.name].surrogate,
        clip=settings.clip,
        correction=settings.correction_settings,
        kl_coef=kl_coef,
        kl_estimator=settings.kl_estimator,
        entropy_coef=settings.entropy_coef,
        needs_old_logprobs=settings.needs_old_logprobs(num_updates),
        has_ratio=settings.ratio_level != "none",
    )


def build_value_loss(settings: AlgorithmSettings) -> Loss:
    """The loss of the critic."""
    assert settings.needs_critic, f"{settings.name} has no critic"
    return losses.ValueLoss(value_coef=settings.value_coef, eps_clip_value=settings.eps_clip_value)


def make_rows(
    groups: Sequence[Group],
    settings: AlgorithmSettings,
    *,
    max_new_tokens: int,
    compute_advantages: bool = True,
) -> list[Row]:
    """Learner rows of scored groups, one per sample, in order.

    With advantage scope "group" the groups may be any part of a batch; with "batch" they must be
    all of it. `max_new_tokens` is the most that may be sampled in one sample, over all its turns:
    what the overlong penalty and the constant norm count against.

    Columns: weights, advantages, rollout_logprobs, with a critic values and returns, and of
    actor_logprobs, ref_logprobs, teacher_logprobs those that the samples carry. Without
    `compute_advantages` the samples must carry advantages (and returns) themselves.
    """
    compute = ALGORITHMS[settings.name].advantages if compute_advantages else None
    return build_rows(groups, settings, compute, max_new_tokens=max_new_tokens)


def _unknown_algorithm(name: str) -> Problem:
    wanted = name.lower().replace("++", "_plus_plus").replace("-", "_")
    near = difflib.get_close_matches(wanted, ALGORITHMS, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]}? " if near else ""
    return Problem(
        where("name", name), "no such algorithm", f"{guess}known are {', '.join(ALGORITHMS)}"
    )
