"""Every advantage function against its formula, in fp64, on random ragged batches."""

from dataclasses import replace

import plain_rl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_rl import Plain
from ragged_batches import flat, plain_samples, rollouts_of

from pentad.rl import advantages as adv

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
"""fp64 sums of a few dozen terms, taken in another order; a division by std + 1e-6 in the worst
case magnifies their rounding by 1e6."""
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.97, 1.0])
quick = settings(max_examples=80, deadline=None)


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (adv.group_relative, plain_rl.grpo),
        (adv.mean_only, plain_rl.dr_grpo),
        (adv.leave_one_out, plain_rl.rloo),
        (adv.batch_mean_baseline, plain_rl.reinforce),
        (adv.length_weighted, plain_rl.opo),
        (adv.centred_and_rescaled, plain_rl.gpg),
        (adv.batch_scaled, plain_rl.lite_ppo),
        (adv.centred_then_whitened, plain_rl.reinforce_plus_plus_baseline),
    ],
)
@quick
@given(samples=plain_samples())
def test_per_sample_advantages_equal_the_formula(ours, plain, samples):
    got = ours(rollouts_of(samples))
    torch.testing.assert_close(got.advantages_T, flat(plain(samples)), **CLOSE)
    totals = [plain_rl.constant(s, plain_rl.total(s)) for s in samples]
    torch.testing.assert_close(got.returns_T, flat(totals), **CLOSE)


@quick
@given(samples=plain_samples(), greedy=st.lists(st.floats(-3, 3), min_size=16, max_size=16))
def test_remax_subtracts_the_reward_of_the_greedy_answer(samples, greedy):
    baselines = [greedy[sample.group] for sample in samples]
    rollouts = replace(
        rollouts_of(samples), baselines_S=torch.tensor(baselines, dtype=torch.float64)
    )
    got = adv.greedy_baseline(rollouts)
    torch.testing.assert_close(got.advantages_T, flat(plain_rl.remax(samples, baselines)), **CLOSE)
    returns = [plain_rl.returns_to_go(s, 1.0) for s in samples]
    torch.testing.assert_close(got.returns_T, flat(returns), **CLOSE)


@quick
@given(samples=plain_samples(), gamma=DISCOUNTS)
def test_reinforce_plus_plus_whitens_discounted_returns(samples, gamma):
    got = adv.reinforce_plus_plus(rollouts_of(samples), gamma=gamma)
    expected = plain_rl.reinforce_plus_plus(samples, gamma)
    torch.testing.assert_close(got.advantages_T, flat(expected), **CLOSE)
    returns = [plain_rl.returns_to_go(s, gamma) for s in samples]
    torch.testing.assert_close(got.returns_T, flat(returns), **CLOSE)


@quick
@given(samples=plain_samples(), gamma=DISCOUNTS, lam=DISCOUNTS)
def test_gae_equals_the_backward_recursion(samples, gamma, lam):
    pairs = [plain_rl.gae(s, gamma, lam) for s in samples]
    advantages, returns = [a for a, _ in pairs], [r for _, r in pairs]
    got = adv.gae(rollouts_of(samples), gamma=gamma, lam=lam)
    torch.testing.assert_close(got.advantages_T, flat(advantages), **CLOSE)
    torch.testing.assert_close(got.returns_T, flat(returns), **CLOSE)
    whitened = adv.whitened_gae(rollouts_of(samples), gamma=gamma, lam=lam)
    expected = flat(plain_rl.whiten(advantages, samples))
    torch.testing.assert_close(whitened.advantages_T, expected, **CLOSE)
    assert torch.equal(whitened.returns_T, got.returns_T)


@quick
@given(samples=plain_samples(), gamma=DISCOUNTS)
def test_distillation_sums_token_rewards_and_ignores_sample_rewards(samples, gamma):
    got = adv.distillation(rollouts_of(samples), gamma=gamma)
    expected = [plain_rl.returns_to_go(s, gamma, with_reward=False) for s in samples]
    torch.testing.assert_close(got.advantages_T, flat(expected), **CLOSE)


def test_long_samples_discount_exactly():
    rewards = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    sample = Plain(0, 0.5, [False] + [True] * 1000, [0.0, *rewards.tolist()], [0.0] * 1001)
    got = adv.reinforce_plus_plus(rollouts_of([sample]), gamma=0.999).returns_T
    torch.testing.assert_close(got, flat([plain_rl.returns_to_go(sample, 0.999)]), **CLOSE)


EVERY = [
    adv.group_relative,
    adv.mean_only,
    adv.leave_one_out,
    adv.length_weighted,
    adv.centred_and_rescaled,
    adv.batch_scaled,
    adv.centred_then_whitened,
    adv.batch_mean_baseline,
    lambda rollouts: adv.reinforce_plus_plus(rollouts, gamma=1.0),
]


@pytest.mark.parametrize("compute", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(compute, dtype):
    # Three times 0.1 has a mean that is not 0.1 in either precision.
    samples = [Plain(0, 0.1, [False, True, True], [0.0] * 3, [0.0] * 3) for _ in range(3)]
    got = compute(rollouts_of(samples, token_rewards=False, dtype=dtype)).advantages_T
    assert got.dtype == dtype
    assert (got == 0).all()


@pytest.mark.parametrize("compute", EVERY[:7])
def test_a_group_of_one_has_no_advantage(compute):
    samples = [Plain(0, 3.0, [False, True], [0.0] * 2, [0.0] * 2)]
    assert (compute(rollouts_of(samples)).advantages_T == 0).all()


@pytest.mark.parametrize("compute", [*EVERY, lambda r: adv.gae(r, gamma=1.0, lam=1.0)])
def test_samples_without_sampled_tokens_get_nothing(compute):
    samples = [Plain(0, r, [False, False], [1.0] * 2, [1.0] * 2) for r in (0.0, 1.0)]
    got = compute(rollouts_of(samples))
    assert (got.advantages_T == 0).all() and (got.returns_T == 0).all()


def test_an_explicit_baseline_is_subtracted():
    samples = [Plain(0, r, [False, True], [0.0] * 2, [0.0] * 2) for r in (1.0, 4.0)]
    baseline = torch.tensor([0.5, 1.0], dtype=torch.float64)
    got = adv.reinforce(rollouts_of(samples), baseline).advantages_T
    assert got.tolist() == [0.0, 0.5, 0.0, 3.0]
    assert adv.reinforce(rollouts_of(samples)).advantages_T.tolist() == [0.0, 1.0, 0.0, 4.0]


def test_group_labels_need_no_order():
    samples = [
        Plain(g, r, [False, True], [0.0] * 2, [0.0] * 2) for g, r in ((9, 1), (2, 5), (9, 3))
    ]
    got = adv.mean_only(rollouts_of(samples)).advantages_T
    assert got.tolist() == [0.0, -1.0, 0.0, 0.0, 0.0, 1.0]
