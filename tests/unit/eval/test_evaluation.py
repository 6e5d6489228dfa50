"""Summaries of judged groups, and votes by reward."""

import asyncio

import numpy as np
import pytest

from pentad.core.errors import RunError
from pentad.core.types import Group, Prompt, Sample
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import RewardConfig
from pentad.rollout.evaluation import Answered, summarise


def sample(text="", reward=0.0, correct=None, length=3, finish="stop"):
    size = length + 1
    mask = np.arange(size) > 0
    return Sample(
        ids=np.arange(size),
        mask=mask,
        rollout_logprobs=np.zeros(size, np.float32),
        versions=np.where(mask, 0, -1),
        finish=finish,
        text=text,
        reward=reward,
        reward_parts={} if correct is None else {"correct": float(correct)},
    )


def answered(gid, *samples, votes=None):
    prompt = Prompt(gid, (0,), {"answer": "4"})
    return Answered(prompt, Group(prompt, list(samples)), votes=votes)


def failed(gid):
    return Answered(Prompt(gid, (0,), {}), None, "reward_error: no number")


def test_figures_are_means_over_prompts():
    result = summarise(
        7,
        [
            answered(0, sample(reward=1, correct=1), sample(reward=0, correct=0, length=7)),
            answered(1, sample(reward=0.5, correct=0, finish="length"), sample(correct=0)),
            failed(2),
        ],
        2.5,
    )
    assert (result.version, result.num_prompts, result.num_failed) == (7, 2, 1)
    assert (result.accuracy, result.reward_mean) == (0.25, 0.375)
    assert result.pass_at == {"1": 0.25, "2": 0.5}
    assert (result.length_mean, result.length_max, result.truncated_share) == (4.0, 7, 0.25)
    assert result.accuracy_low < 0.25 < result.accuracy_high
    assert result.accuracy_ci95 == (result.accuracy_high - result.accuracy_low) / 2
    assert result.majority is None


def test_without_verdicts_there_is_no_accuracy():
    result = summarise(0, [answered(0, sample(reward=2.0))], 1.0)
    assert (result.accuracy, result.accuracy_ci95, result.pass_at) == (None, None, None)
    assert result.reward_mean == 2.0


def test_verdicts_between_right_and_wrong_have_no_pass_at_k():
    result = summarise(0, [answered(0, sample(correct=0.5), sample(correct=1))], 1.0)
    assert (result.accuracy, result.pass_at) == (0.75, None)


def test_votes_are_counted_prompt_by_prompt():
    result = summarise(
        0,
        [
            answered(0, *[sample(correct=c) for c in (1, 1, 0)], votes=["4", "4", "5"]),
            answered(1, *[sample(correct=c) for c in (0, 1, 0)], votes=["5", "4", "5"]),
            failed(2),
        ],
        1.0,
    )
    assert (result.majority, result.accuracy) == (0.5, 0.5)


def test_all_failed_is_an_error_that_says_why():
    with pytest.raises(RunError, match="all 2 prompts failed .reward_error: no number"):
        summarise(0, [failed(0), failed(1)], 1.0)


def results(fn, texts):
    async def main():
        scorer = RewardScorer(RewardConfig(fn=fn))
        await scorer.start()
        try:
            assert scorer.has_results
            return await scorer.results(answered(0, *map(sample, texts)).group)
        finally:
            await scorer.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("fn", "texts", "expected"),
    [
        ("gsm8k", ["#### 1,000", "x #### 1000.0 y", "1000", "#### no"], ["1000"] * 2 + [None] * 2),
        ("numeric", ["so 5-3 = 2", "2.0", "none"], ["2", "2", None]),
        ("exact_match", [" a b\n", "a b", ""], ["a b", "a b", ""]),
        (
            "math",
            [r"\boxed{\frac{1}{2}}", r"first \boxed{3}, then \boxed{0.5}", "nothing"],
            ["1/2", "1/2", None],
        ),
    ],
)
def test_what_completions_come_to(fn, texts, expected):
    assert results(fn, texts) == expected


def test_rewards_without_results_say_so():
    assert not RewardScorer(RewardConfig(fn="code")).has_results
    assert not RewardScorer(RewardConfig(fn="mine.py:score")).has_results
