"""Evaluation: answers and scores prompts, then computes accuracy, pass@k and intervals."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pentad.core.errors import DataFailure, InfraFailure, RunError
from pentad.core.types import Group, Prompt, Sample
from pentad.rollout.executor import Executor, Executors

Z95 = 1.959963984540054
"""Two-sided 95% quantile of the normal distribution."""


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the probability that k answers, drawn without replacement, contain a right one.

    1 - C(n - c, k) / C(n, k), an unbiased estimate for k new answers
    (https://arxiv.org/abs/2107.03374, section 2.1), in exact integers.
    """
    assert 0 <= num_correct <= num_samples, f"{num_correct} of {num_samples} are right"
    assert 1 <= k <= num_samples, f"{k} of {num_samples} answers cannot be drawn"
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_is_correct(votes: Sequence[Hashable | None], correct: Sequence[float]) -> float:
    """The score of the most frequent answer: 1, 0, or between if it is not unique.

    None is no vote; without votes the prompt counts as wrong. Among equally frequent answers, one
    would be chosen at random, so the result is their mean. If equal answers are scored differently,
    which is rare, their mean counts.
    """
    assert len(votes) == len(correct), "one verdict per vote"
    verdicts: dict[Hashable, list[float]] = {}
    for vote, is_right in zip(votes, correct, strict=True):
        if vote is not None:
            verdicts.setdefault(vote, []).append(is_right)
    if not verdicts:
        return 0.0
    most = max(map(len, verdicts.values()))
    return mean([mean(given) for given in verdicts.values() if len(given) == most])


def interval95(values: Sequence[float], num_samples: int) -> tuple[float, float]:
    """Returns a 95% interval of the mean over prompts; each value is a share of right answers.

    Wilson's interval (https://doi.org/10.1080/01621459.1927.10502953) at the effective number of
    independent trials, p (1 - p) / variance of the mean: with one answer per prompt that is the
    number of prompts, with several it is more, at most the number of all answers. Unlike the normal
    interval it has a width if all answers are right, or all wrong. Values outside of 0 to 1 are no
    shares and get the normal interval.
    """
    num, p = len(values), mean(values)
    variance = mean([(value - p) ** 2 for value in values])
    if min(values) < 0 or max(values) > 1:
        half = Z95 * math.sqrt(variance / num)
        return p - half, p + half
    trials = float(num)
    if 0 < p < 1:
        trials = min(num * p * (1 - p) / variance, num_samples) if variance else num_samples
    centre = (p + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    half = Z95 * math.sqrt(p * (1 - p) / trials + (Z95 / (2 * trials)) ** 2)
    half /= 1 + Z95**2 / trials
    return max(0.0, centre - half), min(1.0, centre + half)


log = logging.getLogger(__name__)

MAX_GROUPS_IN_FLIGHT = 512

Votes = list[str | None]
"""The answer of each sample of a group in a countable form; None: no answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of one prompt."""

    prompt: Prompt
    group: Group | None
    """None if its generation or its reward failed."""
    failure: str = ""
    votes: Votes | None = None
    """None if the reward compares no countable answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Results of an evaluation. `accuracy`: mean of the reward part "correct"; None without one."""

    version: int
    num_prompts: int
    num_failed: int
    """Number of prompts whose generation or reward failed; excluded from all means."""
    num_samples: int
    """Number of answers in total."""
    accuracy: float | None
    accuracy_ci95: float | None
    """Half the width of the 95% interval over prompts, accuracy_low to accuracy_high."""
    accuracy_low: float | None
    accuracy_high: float | None
    pass_at: dict[str, float] | None
    """pass@k by k; None unless every answer is judged right (1) or wrong (0)."""
    majority: float | None
    """Accuracy of the most frequent answer of each prompt; None if answers are not counted."""
    reward_mean: float
    length_mean: float
    length_max: int
    truncated_share: float
    seconds: float
    environments: dict[str, dict[str, Any]] | None = None
    """The same figures for each environment, by name; None if a run has one environment."""

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


async def answer_prompts(
    prompts: Sequence[Prompt],
    executor: Executor | Executors,
    *,
    count_votes: Callable[[Group], Awaitable[Votes]] | None = None,
    on_answered: Callable[[Answered], None] | None = None,
) -> list[Answered]:
    """Answers all prompts with the executor, in order. Raises RunError if it cannot continue."""
    gate = asyncio.Semaphore(MAX_GROUPS_IN_FLIGHT)

    async def one(prompt: Prompt) -> Answered:
        async with gate:
            try:
                group = await executor.rollout(prompt, 0)
                votes = await count_votes(group) if count_votes is not None else None
                found = Answered(prompt, group, votes=votes)
            except DataFailure as failure:
                log.warning("evaluation prompt %d failed: %s", prompt.gid, failure)
                found = Answered(prompt, None, str(failure))
        if on_answered is not None:
            on_answered(found)
        return found

    try:
        return await asyncio.gather(*(one(prompt) for prompt in prompts))
    except InfraFailure as failure:
        raise RunError(f"evaluation: {failure}") from failure


def summarise(version: int, answered: Sequence[Answered], seconds: float) -> EvalResult:
    """Summarises: means over prompts of means over samples."""
    groups = [found.group for found in answered if found.group is not None]
    num_failed = len(answered) - len(groups)
    if not groups:
        first = answered[0].failure if answered else "there are none"
        raise RunError(
            f"evaluation of version {version}: all {num_failed} prompts failed ({first})"
        )
    samples = [sample for group in groups for sample in group.samples]
    judged = [own for own in map(_verdicts, groups) if own]
    shares = [mean(own) for own in judged]
    low, high = interval95(shares, sum(map(len, judged))) if judged else (None, None)
    names = sorted({found.prompt.environment for found in answered} - {""})
    return EvalResult(
        environments={name: _of_environment(name, answered) for name in names} or None,
        version=version,
        num_prompts=len(groups),
        num_failed=num_failed,
        num_samples=len(samples),
        accuracy=mean(shares) if judged else None,
        accuracy_ci95=None if low is None or high is None else (high - low) / 2,
        accuracy_low=low,
        accuracy_high=high,
        pass_at=_pass_at(judged),
        majority=_majority(answered),
        reward_mean=mean([mean([_reward(s) for s in group.samples]) for group in groups]),
        length_mean=mean([float(sample.num_sampled) for sample in samples]),
        length_max=max(sample.num_sampled for sample in samples),
        truncated_share=mean([float(sample.finish == "length") for sample in samples]),
        seconds=seconds,
    )


OF_ENVIRONMENTS = (
    *("num_prompts", "num_failed", "num_samples", "accuracy", "accuracy_ci95", "pass_at"),
    *("reward_mean", "length_mean", "truncated_share"),
)


def _of_environment(name: str, answered: Sequence[Answered]) -> dict[str, Any]:
    own = [
        replace(found, prompt=replace(found.prompt, environment=""))
        for found in answered
        if found.prompt.environment == name
    ]
    if not any(found.group for found in own):
        return {"num_prompts": 0, "num_failed": len(own)}
    found = summarise(0, own, 0.0).as_record()
    return {key: found[key] for key in OF_ENVIRONMENTS}


def _verdicts(group: Group) -> list[float]:
    return [s.reward_parts["correct"] for s in group.samples if "correct" in s.reward_parts]


def _pass_at(judged: Sequence[Sequence[float]]) -> dict[str, float] | None:
    """Returns pass@k for powers of two, and for the number of answers that every prompt has."""
    if not judged or any(verdict not in (0, 1) for own in judged for verdict in own):
        return None
    most = min(map(len, judged))
    ks = sorted({2**i for i in range(most.bit_length())} | {most})
    counts = [(len(own), int(sum(own))) for own in judged]
    return {str(k): mean([pass_at_k(n, c, k) for n, c in counts]) for k in ks}


def _majority(answered: Sequence[Answered]) -> float | None:
    found: list[float] = []
    for one in answered:
        if one.group is None:
            continue
        if one.votes is None or len(_verdicts(one.group)) != len(one.votes):
            return None
        found.append(majority_is_correct(one.votes, _verdicts(one.group)))
    return mean(found)


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, "an evaluated sample has a reward"
    return sample.reward
