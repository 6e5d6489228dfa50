"""Checks the overrides of an algorithm: values out of range, contradictions, no effect.

`pentad.config` says the same of a recipe before any process starts.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import get_args

from pentad.core.algorithms import (
    FACTS,
    ON_POLICY,
    TUNABLES,
    AlgorithmFacts,
    AlgorithmSettings,
    CorrectionKind,
    CorrectionLevel,
    KlEstimator,
    KlPlace,
    LossNorm,
    correction_problems,
    decoupled_problems,
    group_problems,
    idle_problems,
    unread_problems,
)
from pentad.core.errors import Problem

CHOICES: dict[str, tuple[str, ...]] = {
    "kl_estimator": get_args(KlEstimator),
    "kl_in": get_args(KlPlace),
    "loss_norm": get_args(LossNorm),
    "correction": get_args(CorrectionKind),
    "correction_level": get_args(CorrectionLevel),
}
POSITIVE = (
    *("eps_clip", "eps_clip_higher", "eps_clip_value", "correction_cap"),
    *("reward_clip", "max_reward"),
)
NOT_NEGATIVE = ("kl_coef", "entropy_coef", "value_coef", "correction_floor", "overlong_penalty")
SHARES = ("gamma", "lam")


def where(name: str, value: object) -> str:
    return f"algorithm.{name} = {value}"


def override_problems(given: Mapping[str, object]) -> Iterator[Problem]:
    """Overrides that are wrong by themselves: unknown names, values out of range."""
    for name, value in given.items():
        if name not in TUNABLES:
            near = difflib.get_close_matches(name, TUNABLES, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(TUNABLES)}"
            yield Problem(where(name, value), "no algorithm has this setting", remedy)
        elif rule := _broken_rule(name, value):
            yield Problem(where(name, value), rule)


def _broken_rule(name: str, value: object) -> str:
    if name in CHOICES:
        return "" if value in CHOICES[name] else f"must be one of {', '.join(CHOICES[name])}"
    if name in ("decoupled", "allow_uncorrected", "dynamic_filter"):
        return "" if isinstance(value, bool) else "must be true or false"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "must be a finite number"
    if name == "overlong_buffer" and (value < 1 or value != int(value)):
        return "must be a whole number of tokens, at least 1"
    if name in POSITIVE and value <= 0:
        return "must be greater than 0"
    if name in NOT_NEGATIVE and value < 0:
        return "must not be negative"
    if name in SHARES and not 0 <= value <= 1:
        return "must lie in 0 ... 1"
    if name == "c_clip" and value <= 1:
        return "must be greater than 1, the ratio of an unchanged policy"
    if name == "reward_scale" and value == 0:
        return "must not be 0, which would make all rewards equal"
    return ""


def conflict_problems(
    settings: AlgorithmSettings, given: Mapping[str, object], facts: AlgorithmFacts
) -> Iterator[Problem]:
    """Overrides that contradict each other or would have no effect."""
    yield from unread_problems(settings.name, facts, given)
    yield from idle_problems(settings, given)
    if not settings.correction_floor <= 1 <= settings.correction_cap:
        band = f"[{settings.correction_floor}, {settings.correction_cap}]"
        rule = f"the band {band} of correction_floor and correction_cap must hold the ratio 1"
        name = "correction_cap" if settings.correction_cap < 1 else "correction_floor"
        yield Problem(where(name, given.get(name)), rule)
    yield from decoupled_problems(settings)
    yield from correction_problems(settings, given)


def run_problems(
    settings: AlgorithmSettings,
    *,
    group_size: int,
    max_new_tokens: int,
    max_staleness: int = 0,
    num_updates: int = 1,
) -> list[Problem]:
    """What is wrong between an algorithm and the sampling of a run."""
    problems = []
    run = {"max_staleness": max_staleness, "updates_per_batch": num_updates}
    is_off_policy = any(run[key] > most for key, most in ON_POLICY.items())
    if is_off_policy and settings.correction == "none" and not settings.allow_uncorrected:
        rule = (
            f"with max_staleness = {max_staleness} and updates_per_batch = {num_updates} the "
            "policy that is trained is not the one that sampled"
        )
        remedy = "leave it out, or set algorithm.allow_uncorrected=true"
        problems.append(Problem(where("correction", "none"), rule, remedy))
    problems += group_problems(settings.name, FACTS[settings.name], group_size)
    buffer = settings.overlong_buffer
    if settings.overlong_penalty and buffer is not None and buffer > max_new_tokens:
        rule = f"must not exceed the {max_new_tokens} tokens that a sample may have"
        problems.append(Problem(where("overlong_buffer", buffer), rule))
    return problems
