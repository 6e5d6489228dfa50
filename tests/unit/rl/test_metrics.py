"""The RL fields of a step record, against values worked out by hand or by plain loops."""

import json
import math

import numpy as np
import pytest
import torch
from ragged_batches import make_groups, make_sample
from sections import settings_for

from pentad.core.types import Greedy, Group, Prompt, Row
from pentad.rl.algorithms import make_rows
from pentad.rl.metrics import (
    compute_metrics,
    effective_sample_size,
    loss_metrics,
    sample_metrics,
    staleness_histogram,
    token_metrics,
)

RNG = np.random.default_rng(0)


def group(gid, *samples):
    return Group(Prompt(gid, (1,), {}), list(samples))


def sample(length, reward, *, finish="stop", version=0):
    return make_sample(
        RNG, [False] + [True] * length, reward=reward, finish=finish, version=version
    )


def row(trainer, sampler, *, ref=None, advantages=None, entropy=None):
    """A row with one prompt token, whose entries are wild, and what the learner said of it."""
    wild = [1e9]
    columns = {
        "weights": [0.0] + [0.5] * len(trainer),
        "advantages": wild + (advantages or [1.0] * len(trainer)),
        "rollout_logprobs": wild + sampler,
    }
    if ref is not None:
        columns["ref_logprobs"] = wild + ref
    tensors = {name: torch.tensor(column) for name, column in columns.items()}
    output = {"logprobs": torch.tensor([-7.0, *trainer])}
    if entropy is not None:
        output["entropy"] = torch.tensor(wild + entropy)
    return Row(torch.zeros(1 + len(trainer), dtype=torch.int64), tensors, 1.0), output


def test_rewards_lengths_and_truncation_are_counted_over_samples():
    groups = [
        group(0, sample(2, 1.0), sample(4, 0.0, finish="length")),
        group(1, sample(3, 0.5), sample(3, 0.5)),
        group(2, sample(0, -1.0)),
    ]
    groups[0].greedy, groups[2].greedy = Greedy(4.0, 9), Greedy(1.0, 9)
    assert sample_metrics(groups) == {
        "reward_mean": pytest.approx(0.2),
        "reward_std": pytest.approx(math.sqrt((0.64 + 0.04 + 0.09 + 0.09 + 1.44) / 5)),
        "reward_min": -1.0,
        "reward_max": 1.0,
        "reward_greedy": 2.5,
        "groups_without_variance": pytest.approx(2 / 3),
        "length_mean": pytest.approx(12 / 5),
        "length_min": 0.0,
        "length_max": 4.0,
        "truncated_share": pytest.approx(1 / 5),
    }


def test_equal_rewards_have_no_deviation():
    rewards = [0.1] * 3
    assert np.std(rewards) > 0  # the mean of three times 0.1 is rounded
    assert sample_metrics([group(0, *(sample(2, r) for r in rewards))])["reward_std"] == 0.0


def test_unscored_samples_leave_rewards_null():
    metrics = sample_metrics([group(0, sample(2, None))])
    assert metrics["reward_mean"] is None and metrics["groups_without_variance"] is None
    assert metrics["length_mean"] == 2


def test_trainer_against_sampler():
    log_ratios = [0.0, 0.1, -0.4, 2.0]
    sampler = [-1.0, -2.0, -0.5, -3.0]
    trainer = [s + d for s, d in zip(sampler, log_ratios, strict=True)]
    pairs = [row(trainer[:3], sampler[:3]), row(trainer[3:], sampler[3:])]
    rows, outputs = zip(*pairs, strict=True)
    metrics = token_metrics(rows, outputs, settings_for("grpo"))
    ratios = [math.exp(d) for d in log_ratios]
    # Columns are fp32.
    close = {"rel": 1e-5, "abs": 1e-6}
    assert metrics["ratio_mean"] == pytest.approx(sum(ratios) / 4, **close)
    assert metrics["ratio_max"] == pytest.approx(max(ratios), **close)
    assert metrics["ratio_p95"] == pytest.approx(np.quantile(ratios, 0.95), **close)
    assert metrics["logprob_diff_mean"] == pytest.approx(2.5 / 4, **close)
    assert metrics["logprob_diff_p95"] == pytest.approx(
        np.quantile([0, 0.1, 0.4, 2.0], 0.95), **close
    )
    assert metrics["logprob_diff_p99"] == pytest.approx(
        np.quantile([0, 0.1, 0.4, 2.0], 0.99), **close
    )
    assert metrics["logprob_diff_max"] == pytest.approx(2.0, **close)
    assert metrics["outside_clip_share"] == 0.5  # exp(-0.4) and exp(2) leave [0.8, 1.2]
    k3 = sum(r - 1 - d for r, d in zip(ratios, log_ratios, strict=True)) / 4
    assert metrics["kl_sampler"] == pytest.approx(k3, **close)
    ess = sum(ratios) ** 2 / (4 * sum(r * r for r in ratios))
    assert metrics["effective_sample_size"] == pytest.approx(ess, **close)
    assert metrics["kl_ref"] is None and metrics["entropy"] is None


def test_the_clip_band_of_gspo_is_held_against_whole_sequences():
    pairs = [row([-1.0, -1.0], [-0.5, -1.5]), row([-1.0], [-1.1]), row([], [])]
    rows, outputs = zip(*pairs, strict=True)
    metrics = token_metrics(rows, outputs, settings_for("gspo"))
    assert metrics["outside_clip_share"] == pytest.approx(1 / 3)
    assert token_metrics(rows, outputs, settings_for("reinforce"))["outside_clip_share"] is None


def test_kl_to_the_reference_entropy_and_advantages():
    one, output = row(
        [-1.0, -2.0], [-1.0, -2.0], ref=[-1.5, -1.0], advantages=[2.0, -1.0], entropy=[0.5, 1.5]
    )
    metrics = token_metrics([one], [output], settings_for("grpo", kl_coef=0.1))
    expected = ((math.exp(-0.5) - 1 + 0.5) + (math.exp(1.0) - 1 - 1.0)) / 2
    assert metrics["kl_ref"] == pytest.approx(expected, rel=1e-6)
    assert metrics["entropy"] == 1.0
    assert metrics["advantage_mean"] == 0.5 and metrics["advantage_std"] == 1.5


def test_effective_sample_size_runs_from_one_over_n_to_one():
    assert effective_sample_size(np.zeros(5)) == 1.0
    assert effective_sample_size(np.full(5, 80.0)) == 1.0
    assert effective_sample_size(np.array([800.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_sample_size(np.array([])) is None


def test_extreme_and_broken_log_probs_never_make_an_invalid_record():
    one, output = row([-80.0, 0.0], [0.0, -80.0])
    metrics = token_metrics([one], [output], settings_for("grpo"))
    assert metrics["ratio_max"] == pytest.approx(math.exp(20))
    assert metrics["logprob_diff_max"] == 80.0
    output["logprobs"][1] = math.nan
    broken = token_metrics([one], [output], settings_for("grpo"))
    assert broken["ratio_mean"] is None and broken["effective_sample_size"] is None
    json.dumps(broken, allow_nan=False)


def test_shares_come_from_the_sums_of_the_loss():
    stats = {"tokens": 8.0, "clipped_tokens": 2.0, "policy_loss": 1.0}
    assert loss_metrics(stats, settings_for("grpo")) == {
        "clip_fraction": 0.25,
        "corrected_share": None,
        "correction_weight_mean": None,
        "rejected_share": None,
        "prox_logp_error": None,
    }
    stats |= {"corrected_tokens": 1.0, "correction_weight": 6.0, "rejected_tokens": 4.0}
    stats |= {"proximal_error": 2.0}
    metrics = loss_metrics(stats, settings_for("reinforce"))
    assert metrics == {
        "clip_fraction": None,
        "corrected_share": 0.125,
        "correction_weight_mean": 0.75,
        "rejected_share": 0.5,
        "prox_logp_error": 0.25,
    }
    assert set(loss_metrics({}, settings_for("grpo")).values()) == {None}


def test_staleness_counts_tokens_by_lag():
    groups = [group(0, sample(2, 0.0, version=5), sample(3, 0.0, version=3)), group(1)]
    groups[0].samples[0].versions[-1] = 4  # a sample that spans two versions
    assert staleness_histogram(groups, 5) == {"0": 1, "1": 1, "2": 3}
    assert staleness_histogram([], 5) == {}


def test_a_whole_record_has_every_field_and_is_valid_json():
    groups = make_groups(np.random.default_rng(3), [2, 3], columns=("ref_logprobs",))
    settings = settings_for("grpo", kl_coef=0.1)
    rows = make_rows(groups, settings, max_new_tokens=8)
    outputs = [
        {
            "logprobs": r.columns["rollout_logprobs"],
            "entropy": torch.ones_like(r.columns["weights"]),
        }
        for r in rows
    ]
    metrics = compute_metrics(groups, rows, outputs, settings, stats={"tokens": 1.0})
    json.dumps(metrics, allow_nan=False)
    assert metrics["kl_sampler"] == 0.0 and metrics["effective_sample_size"] == 1.0
    empty = compute_metrics([], [], [], settings)
    assert set(empty) == set(metrics) and set(empty.values()) == {None}
