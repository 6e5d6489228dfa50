"""Losses of preferences against their published formulas, differentiated by torch in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pentad.rl.preferences import (
    AnswerLogProbs,
    label_loss,
    pair_loss,
    preference_metrics,
)
from pentad.rl.section import PreferenceConfig

CLOSE = dict(rtol=1e-12, atol=1e-14)


def scored(num, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    policy, reference = rng.normal(-20, 5 * scale, (2, num))
    return AnswerLogProbs(policy, reference, rng.integers(1, 40, num).astype(float))


def differentiate(given, loss):
    """Values and slopes of a loss of the policy's log-probs."""
    policy = torch.tensor(given.policy, requires_grad=True)
    losses = loss(policy - torch.tensor(given.reference))
    losses.sum().backward()
    return losses.detach().numpy(), policy.grad.numpy()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("beta", [0.05, 1.0])
def test_dpo_is_its_formula(beta, smoothing):
    given = scored(12)
    found = pair_loss(given, PreferenceConfig(beta=beta, label_smoothing=smoothing))

    def loss(ratio):
        margin = beta * (ratio[0::2] - ratio[1::2])
        return -F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing

    losses, slopes = differentiate(given, loss)
    np.testing.assert_allclose(found.losses, losses, **CLOSE)
    np.testing.assert_allclose(found.slopes, slopes, **CLOSE)


def test_ipo_is_its_formula_over_means():
    given = scored(12)
    found = pair_loss(given, PreferenceConfig(loss="ipo", beta=0.3))
    lengths = torch.tensor(given.lengths)

    def loss(ratio):
        mean = ratio / lengths
        return (mean[0::2] - mean[1::2] - 1 / (2 * 0.3)) ** 2

    losses, slopes = differentiate(given, loss)
    np.testing.assert_allclose(found.losses, losses, **CLOSE)
    np.testing.assert_allclose(found.slopes, slopes, **CLOSE)


@pytest.mark.parametrize("seed", [1, 3])  # the divergence is above 0, and cut off there
def test_kto_is_its_formula(seed):
    given, others = scored(9), scored(9, seed=seed)
    good = np.arange(9) % 3 == 0
    settings = PreferenceConfig(loss="kto", desirable_weight=1.5, undesirable_weight=0.75)
    found = label_loss(given, good, others, settings)
    divergence = max(0.0, (others.policy - others.reference).mean())
    is_good = torch.tensor(good)

    def loss(ratio):
        chosen = 1.5 * (1 - torch.sigmoid(settings.beta * (ratio - divergence)))
        rejected = 0.75 * (1 - torch.sigmoid(settings.beta * (divergence - ratio)))
        return torch.where(is_good, chosen, rejected)

    losses, slopes = differentiate(given, loss)
    assert found.divergence == divergence
    np.testing.assert_allclose(found.losses, losses, **CLOSE)
    np.testing.assert_allclose(found.slopes, slopes, **CLOSE)


def test_the_seeds_of_kto_cover_both_signs_of_its_divergence():
    means = [scored(9, seed=seed).log_ratio.mean() for seed in (1, 3)]
    assert min(means) < 0 < max(means)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto"])
def test_log_probs_far_apart_have_finite_losses(loss):
    given, settings = scored(4, scale=1e6), PreferenceConfig(loss=loss, beta=1.0)
    if loss == "kto":
        found = label_loss(given, np.array([True, False, True, False]), given, settings)
    else:
        found = pair_loss(given, settings)
    assert np.isfinite(found.losses).all() and np.isfinite(found.slopes).all()


def test_metrics_of_pairs():
    given = AnswerLogProbs(np.array([-1.0, -4.0, -6.0, -2.0]), np.full(4, -3.0), np.ones(4))
    found = preference_metrics(pair_loss(given, PreferenceConfig(beta=0.5)))
    assert found == {
        "chosen_reward": pytest.approx(-0.25),
        "rejected_reward": 0.0,
        "margin": pytest.approx(-0.25),
        "accuracy": 0.5,
        "divergence": None,
    }
