"""Alarms: each sign alone raises its own sentence, a healthy run none."""

import pytest

from pentad.rl.health import WINDOW, find_alarms

FINE = {
    "reward_mean": 0.4,
    "reward_std": 0.3,
    "reward_max": 1.0,
    "groups_without_variance": 0.3,
    "entropy": 1.0,
    "ratio_p95": 1.1,
    "effective_sample_size": 0.95,
    "logprob_diff_mean": 0.005,
    "truncated_share": 0.1,
    "adapter_effect": 0.2,
    "adapter_effect_sampler": 0.2,
}
SIGNS = [
    ({"reward_std": 0.0, "reward_mean": 0.0, "groups_without_variance": 1.0}, "same reward, 0"),
    ({"groups_without_variance": 0.95}, "in 95% of groups all samples got the same reward"),
    ({"entropy": 0.05}, "entropy has fallen from 1 to 0.05"),
    ({"ratio_p95": 3.0}, "more than 3 times likelier"),
    ({"effective_sample_size": 0.1}, "effective sample size is 10%"),
    ({"logprob_diff_mean": 0.05}, "differ by 0.05 per log-prob, 0.005 at the start"),
    ({"truncated_share": 0.8}, "80% of answers are cut"),
    ({"adapter_effect_sampler": 0.0}, "samples are drawn from the frozen weights"),
]


def test_a_healthy_run_raises_nothing():
    assert find_alarms([FINE] * WINDOW, FINE) == []


@pytest.mark.parametrize(("sign", "sentence"), SIGNS)
def test_each_sign_raises_its_own_sentence(sign, sentence):
    (alarm,) = find_alarms([FINE] + [{**FINE, **sign}] * WINDOW, FINE)
    assert sentence in alarm


@pytest.mark.parametrize(("sign", "sentence"), SIGNS)
def test_a_sign_must_last(sign, sentence):
    bad = {**FINE, **sign}
    assert find_alarms([bad] * (WINDOW - 1), FINE) == []
    assert find_alarms([bad] * (WINDOW - 1) + [FINE], FINE) == []


def test_missing_and_null_fields_raise_nothing():
    assert find_alarms([{}] * WINDOW, {}) == []
    assert find_alarms([dict.fromkeys(FINE)] * WINDOW, FINE) == []


def test_certainty_on_a_solved_task_is_no_collapse():
    solved = {**FINE, "entropy": 0.01, "reward_mean": 0.99}
    assert find_alarms([solved] * WINDOW, FINE) == []
    (alarm,) = find_alarms([{**solved, "groups_without_variance": 1.0}] * WINDOW, FINE)
    assert "take harder prompts" in alarm


def test_groups_of_equal_rewards_are_no_alarm_where_they_carry_signal():
    """As with one sample per prompt and a critic, or a greedy answer as baseline."""
    flat = {**FINE, "groups_without_variance": 1.0}
    assert find_alarms([flat] * WINDOW, FINE) != []
    assert find_alarms([flat] * WINDOW, FINE, compares_samples=False) == []


def test_a_small_mismatch_may_triple():
    first = {**FINE, "logprob_diff_mean": 1e-6}
    assert find_alarms([{**FINE, "logprob_diff_mean": 1e-3}] * WINDOW, first) == []


def test_log_probs_of_stale_data_may_differ():
    """With older weights on the sampler the gap is what was asked for, not a fault."""
    stale = {**FINE, "logprob_diff_mean": 0.05, "staleness": {"0": 3, "1": 40}}
    fresh = {**FINE, "staleness": {"0": 40}}
    assert find_alarms([fresh] + [stale] * WINDOW, fresh) == []
    assert find_alarms([fresh] + [{**stale, "staleness": {"0": 40}}] * WINDOW, fresh) != []


@pytest.mark.parametrize(
    ("sign", "has", "advised", "instead"),
    [
        ({"ratio_p95": 3.0}, {"correction": "tis"}, "correction=tis", "the learning rate"),
        ({"ratio_p95": 3.0}, {"correction": "sampler_ratio"}, "correction=tis", "max_staleness"),
        ({"effective_sample_size": 0.1}, {"correction": "mis"}, "correction=mis", "correction_cap"),
        ({"truncated_share": 0.8}, {"has_penalty": True}, "overlong_penalty", "max_new_tokens"),
    ],
)
def test_what_a_run_has_already_is_not_advised(sign, has, advised, instead):
    window = [{**FINE, **sign}] * WINDOW
    (without,), (alarm,) = find_alarms(window, FINE), find_alarms(window, FINE, **has)
    assert advised in without and advised not in alarm
    assert alarm.endswith(instead) or instead in alarm.partition(";")[2]
