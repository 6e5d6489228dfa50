"""What n judged answers to each of many prompts say about a model. Pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

Z95 = 1.959963984540054
"""Two-sided 95% of the normal distribution."""


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that k answers, drawn without replacement from those given, hold a right one.

    1 - C(n - c, k) / C(n, k), which has the expectation of drawing k fresh answers
    (https://arxiv.org/abs/2107.03374, section 2.1), in exact integers.
    """
    assert 0 <= num_correct <= num_samples, f"{num_correct} of {num_samples} are right"
    assert 1 <= k <= num_samples, f"{k} of {num_samples} answers cannot be drawn"
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_is_correct(votes: Sequence[Hashable | None], correct: Sequence[float]) -> float:
    """How right the most frequent answer is: 1, 0, or between where it is not clear.

    An answer of None does not vote; without a vote the prompt is answered wrong. Of answers that
    are equally frequent one is drawn, so the result is their mean. Equal answers are nearly always
    judged alike; where they are not, their mean counts.
    """
    assert len(votes) == len(correct), "one verdict a vote"
    verdicts: dict[Hashable, list[float]] = {}
    for vote, is_right in zip(votes, correct, strict=True):
        if vote is not None:
            verdicts.setdefault(vote, []).append(is_right)
    if not verdicts:
        return 0.0
    most = max(map(len, verdicts.values()))
    return mean([mean(given) for given in verdicts.values() if len(given) == most])


def interval95(values: Sequence[float], num_samples: int) -> tuple[float, float]:
    """A 95% interval of the mean over prompts, where each value is a share of right answers.

    Wilson's interval (https://doi.org/10.1080/01621459.1927.10502953) at the effective number of
    independent trials, p (1 - p) / variance of the mean: with one answer a prompt that is the
    number of prompts, with several it is more, at most the number of all answers. Unlike the
    normal interval it has a width where all answers are right, or all wrong. Values outside of
    0 to 1 are no shares and get the normal interval.
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
