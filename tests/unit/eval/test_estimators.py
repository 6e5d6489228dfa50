"""The estimators against plain enumeration."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.rollout.evaluation import interval95, majority_is_correct, pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for c in range(n + 1):
        verdicts = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(verdicts, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_is_unbiased():
    """Its mean over all ways n answers can come out is the chance with k fresh ones."""
    n, k, p = 6, 3, 0.3
    expected = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_is_exact_for_many_samples():
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5, rel=1e-10)


def test_more_draws_than_answers_are_refused():
    with pytest.raises(AssertionError, match="5 of 4"):
        pass_at_k(4, 1, 5)


@pytest.mark.parametrize(
    ("votes", "correct", "expected"),
    [
        (["4", "4", "7"], [1, 1, 0], 1.0),
        (["7", "4", "7"], [0, 1, 0], 0.0),
        (["4", "7"], [1, 0], 0.5),  # a tie: one of the two is drawn
        (["4", "7", "9", "9", "4"], [1, 0, 0, 0, 1], 0.5),
        ([None, None, "4"], [0, 0, 1], 1.0),  # what comes to nothing does not vote
        ([None, None], [0, 0], 0.0),
        (["4", "4"], [1, 0], 0.5),  # one answer judged in two ways
    ],
)
def test_majority(votes, correct, expected):
    assert majority_is_correct(votes, correct) == expected


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.sampled_from("abc"))
def test_majority_equals_the_mean_over_all_tie_breaks(votes, right):
    most = max(votes.count(v) for v in votes)
    winners = [v for v in set(votes) if votes.count(v) == most]
    expected = sum(v == right for v in winners) / len(winners)
    assert majority_is_correct(votes, [float(v == right) for v in votes]) == expected


def covers(num_prompts, p):
    """The chance that the interval of binary verdicts holds p, over all outcomes."""
    total = 0.0
    for c in range(num_prompts + 1):
        low, high = interval95([1.0] * c + [0.0] * (num_prompts - c), num_prompts)
        chance = math.comb(num_prompts, c) * p**c * (1 - p) ** (num_prompts - c)
        total += chance * (low <= p <= high)
    return total


def test_the_interval_holds_the_truth_about_95_times_in_100():
    found = [covers(100, p) for p in (0.05, 0.1, 0.3, 0.5, 0.7, 0.95)]
    assert min(found) > 0.92  # Wilson's actual coverage swings by a few percent around 95
    assert sum(found) / len(found) == pytest.approx(0.95, abs=0.015)


def test_the_interval_of_sure_results_is_wilsons():
    low, high = interval95([1.0] * 20, 20)
    assert (low, high) == (pytest.approx(20 / (20 + 1.96**2), abs=1e-4), 1.0)
    assert interval95([0.0] * 20, 160) == (0.0, pytest.approx(1 - low))


def test_answers_of_one_prompt_do_not_count_as_prompts():
    """Eight answers that always agree say no more than one; eight independent ones say more."""
    alike = [1.0, 0.0] * 50
    assert interval95(alike, 800) == pytest.approx(interval95(alike, 100))
    rng = np.random.default_rng(0)
    mixed = rng.binomial(8, 0.5, 100) / 8
    low, high = interval95(list(mixed), 800)
    assert high - low < 0.5 * np.diff(interval95(alike, 100))[0]
    same = [0.5] * 100
    assert interval95(same, 800) == pytest.approx(interval95([1.0, 0.0] * 400, 800))


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_the_interval_holds_its_mean_and_stays_within_0_and_1(values):
    low, high = interval95(values, 4 * len(values))
    assert 0 <= low <= sum(values) / len(values) + 1e-12
    assert sum(values) / len(values) - 1e-12 <= high <= 1


def test_values_that_are_no_shares_get_the_normal_interval():
    low, high = interval95([2.0, 4.0], 2)
    assert (low, high) == pytest.approx(
        (3 - 1.96 / math.sqrt(2), 3 + 1.96 / math.sqrt(2)), abs=1e-4
    )
