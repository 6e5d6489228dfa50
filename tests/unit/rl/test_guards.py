"""Guards: single tokens cannot decide a step, and noise is no signal; ordinary data stay."""

import math

import numpy as np
import pytest
import torch
from ragged_batches import ListSegments
from sections import settings_for

from pentad.core.errors import RunError
from pentad.core.types import Group, Prompt, Sample, TokenOutputs
from pentad.rl.algorithms import build_policy_loss, make_rows
from pentad.rl.facts import FACTS
from pentad.rl.kl import MAX_K3_SLOPE, estimate_kl

ONE = torch.ones(1, dtype=torch.bool)


def k3(d):
    """Value and slope at log p - log ref = d."""
    logprob = torch.tensor([-50.0], dtype=torch.float64, requires_grad=True)
    value = estimate_kl(logprob, logprob.detach() - d, ONE, "k3")
    return value.item(), torch.autograd.grad(value.sum(), logprob)[0].item()


def test_k3_is_itself_up_to_its_largest_slope_and_a_line_below():
    for d in (-2.3, -1.0, 0.0, 0.5, 5.0):
        value, slope = k3(d)
        assert value == pytest.approx(math.exp(-d) - 1 + d, rel=1e-9)
        assert slope == pytest.approx(1 - math.exp(-d), rel=1e-9)
    edge = -math.log(1 + MAX_K3_SLOPE)
    at_edge = k3(edge)[0]
    for d in (-2.5, -8.0, -19.9):
        value, slope = k3(d)
        assert slope == -MAX_K3_SLOPE
        assert value == pytest.approx(at_edge + MAX_K3_SLOPE * (edge - d), rel=1e-9)
    assert k3(-80.0)[0] < 200 and k3(-80.0)[1] == 0


def token_gradient(name, logprob, old, advantage, **overrides):
    """Loss and its slope for one token, with several updates."""
    settings = settings_for(name, **overrides)
    logprobs = torch.tensor([float(logprob)], requires_grad=True)
    columns = {
        "weights": torch.ones(1),
        "advantages": torch.tensor([float(advantage)]),
        "actor_logprobs": torch.tensor([float(old)]),
        "rollout_logprobs": torch.tensor([float(old)]),
        "ref_logprobs": torch.tensor([float(old)]),
        "penalised": torch.zeros(1),
    }
    loss = build_policy_loss(settings, num_updates=2)
    outputs = TokenOutputs(logprobs, None, None, ListSegments([1]))
    value, _ = loss(outputs, {key: columns[key] for key in loss.columns})
    return value.item(), torch.autograd.grad(value, logprobs)[0].item()


RATIO = [name for name in FACTS if settings_for(name).facts.ratio_level != "none"]


@pytest.mark.parametrize("name", RATIO)
@pytest.mark.parametrize("correction", [None, "sampler_ratio"])
def test_a_far_ratio_with_a_negative_advantage_is_bounded(name, correction):
    for distance in (3.0, 12.0, 40.0):
        loss, slope = token_gradient(name, -1.0, -1.0 - distance, -2.0, correction=correction)
        assert abs(loss) <= 2 * 4 + 1e-5 and abs(slope) <= 2 * 4 + 1e-5, distance


def test_the_dual_clip_acts_beyond_3_and_only_there():
    near, slope = token_gradient("grpo", -1.0, -1.0 - math.log(2.9), -1.0)
    assert (near, slope) == (pytest.approx(2.9, rel=1e-5), pytest.approx(2.9, rel=1e-5))
    far, slope = token_gradient("grpo", -1.0, -1.0 - math.log(3.1), -1.0)
    assert (far, slope) == (3.0, 0.0)
    off, slope = token_gradient("grpo", -1.0, -1.0 - math.log(3.1), -1.0, c_clip=1e9)
    assert slope == pytest.approx(3.1, rel=1e-5)


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("correction", ["none", "tis"])
def test_an_impossible_token_has_a_finite_loss_and_no_gradient(name, correction):
    for advantage in (-1.0, 1.0):
        more = {"correction": correction, "kl_coef": 0.1, "kl_in": "loss"}
        loss, slope = token_gradient(name, -math.inf, -3.0, advantage, **more)
        assert math.isfinite(loss) and slope == 0


def group(rewards, lengths=None, columns=None, gid=0):
    samples = []
    for i, reward in enumerate(rewards):
        num = (lengths or [3] * len(rewards))[i]
        mask = np.array([False] + [True] * num)
        own = {name: np.where(mask, value(i), 0.0) for name, value in (columns or {}).items()}
        samples.append(
            Sample(
                ids=np.arange(num + 1),
                mask=mask,
                rollout_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                versions=np.where(mask, 0, -1),
                finish="stop",
                reward=reward,
                columns=own,
            )
        )
    return Group(Prompt(gid, (0,), {}), samples)


def advantages(settings, *groups):
    rows = make_rows(groups, settings, max_new_tokens=8)
    return torch.cat([row.columns["advantages"][1:] for row in rows])


noise = np.random.default_rng(0).normal(0, 1e-3, 64)
NOISY = {"ref_logprobs": lambda i: -1.0 + noise[i], "values": lambda i: noise[i]}


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "reinforce_plus_plus", "ppo"])
def test_equal_rewards_do_not_make_noise_a_signal(name):
    settings = settings_for(name, kl_coef=1.0, kl_in="reward", kl_estimator="k1")
    flat = advantages(settings, group([0.0] * 8, columns=NOISY))
    assert 0 < flat.abs().max() < 0.02  # a few thousandths times tokens, once 2 to 3
    told = advantages(settings, group([1.0, 0.0] * 4, columns=NOISY))
    assert 0.9 < told.abs().mean() < 1.1


def test_distillation_is_bounded_by_token_and_by_key():
    far = {"teacher_logprobs": lambda i: (-4.0, -40.0)[i]}
    assert advantages(settings_for("distill"), group([None] * 2, columns=far)).tolist() == (
        [-3.0] * 3 + [-10.0] * 3
    )
    wide = settings_for("distill", reward_clip=50.0)
    assert advantages(wide, group([None] * 2, columns=far))[-1] == -39


def test_absurd_rewards_stop_with_their_size_and_the_remedy():
    for reward in (1e300, -1e300, 2e6):
        with pytest.raises(RunError, match=r"max_reward = 1e\+06 stops.*algorithm.reward_clip"):
            advantages(settings_for("grpo"), group([0.0, reward]))
    clipped = settings_for("grpo", reward_clip=5.0)
    assert advantages(clipped, group([0.0, 1e300])).abs().max() == pytest.approx(0.707, abs=1e-3)
    wide = settings_for("grpo", max_reward=1e9)
    assert advantages(wide, group([0.0, 2e6])).abs().max() == pytest.approx(0.707, abs=1e-3)
