"""Every loss, value and gradient, against its formula in fp64, on random ragged microbatches."""

import math

import plain_rl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import ListSegments
from sections import settings_for

from pentad.core.errors import RunError
from pentad.core.types import TokenOutputs
from pentad.rl import losses
from pentad.rl.kl import Correction, correction_weights
from pentad.rl.losses import Clip, PolicyLoss, SftLoss, ValueLoss

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
"""fp64, a few dozen terms in another order; extreme ratios reach exp(20), hence relative."""
LOG_RATIOS = [0.0, 0.05, -0.05, 0.3, -0.3, 1.2, -2.0, 80.0, -80.0]
quick = settings(max_examples=60, deadline=None)


class Microbatch:
    """Random sequences; every column is flat, fp64, and wild where nothing is trained."""

    def __init__(self, lengths, seed, spread):
        self.lengths = lengths
        generator = torch.Generator().manual_seed(seed)
        num = sum(lengths)

        def normal():
            return torch.randn(num, generator=generator, dtype=torch.float64)

        def shift():
            picked = torch.randint(len(LOG_RATIOS), (num,), generator=generator)
            return torch.tensor(LOG_RATIOS, dtype=torch.float64)[picked] * spread

        self.mask = torch.rand(num, generator=generator) < 0.7
        weights = torch.rand(num, generator=generator, dtype=torch.float64) + 0.1
        logprobs = -normal().abs()
        self.columns = {
            "weights": torch.where(self.mask, weights, 0.0),
            "advantages": normal().round(decimals=1),
            "actor_logprobs": logprobs - shift(),
            "rollout_logprobs": logprobs - shift(),
            "ref_logprobs": logprobs - shift(),
            "returns": normal(),
            "values": normal(),
        }
        self.logprobs = logprobs.requires_grad_()
        self.entropy = normal().abs().requires_grad_()
        self.values = normal().requires_grad_()

    def outputs(self):
        segments = ListSegments(self.lengths)
        return TokenOutputs(self.logprobs, self.entropy, self.values, segments)

    def leaves(self):
        return [self.logprobs, self.entropy, self.values]

    def sequences(self):
        """Indices of the trained tokens, sequence by sequence."""
        start = 0
        for length in self.lengths:
            yield [t for t in range(start, start + length) if self.mask[t]]
            start += length


microbatches = st.builds(
    Microbatch,
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 0.1, 1.0]),
)


def grads(loss, leaves):
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    pairs = zip(found, leaves, strict=True)
    return [torch.zeros_like(x) if g is None else g for g, x in pairs]


def assert_same(batch, loss, expected):
    """Equal values and equal gradients with respect to everything the model says."""
    value, _ = loss(batch.outputs(), {name: batch.columns[name] for name in loss.columns})
    expected = expected + 0 * sum(leaf.sum() for leaf in batch.leaves())
    torch.testing.assert_close(value, expected, **CLOSE)
    for got, want in zip(
        grads(value, batch.leaves()), grads(expected, batch.leaves()), strict=True
    ):
        torch.testing.assert_close(got, want, **CLOSE)


def zero():
    return torch.zeros((), dtype=torch.float64)


def policy(surrogate, clip, *, kind="none", **kwargs):
    correction = kwargs.pop("correction", Correction(kind=kind))
    has_ratio = surrogate is not losses.unclipped
    return PolicyLoss(surrogate, clip=clip, correction=correction, has_ratio=has_ratio, **kwargs)


CLIPS = st.sampled_from([Clip(0.2, 0.2), Clip(0.2, 0.28), Clip(0.1, 0.4, dual=3.0), Clip(1.0, 3.0)])


@quick
@given(batch=microbatches, clip=CLIPS)
def test_clipped_equals_the_min_of_ppo_with_asymmetric_and_dual_clip(batch, clip):
    expected, c = zero(), batch.columns
    for t in torch.nonzero(batch.mask).flatten().tolist():
        ratio = plain_rl.exp(batch.logprobs[t] - c["actor_logprobs"][t])
        term = plain_rl.ppo_term(ratio, c["advantages"][t], clip.low, clip.high, clip.dual)
        expected = expected + c["weights"][t] * term
    assert_same(batch, policy(losses.clipped, clip, needs_old_logprobs=True), expected)


@quick
@given(batch=microbatches, clip=CLIPS)
def test_cispo_weighs_log_probs_by_a_clipped_constant(batch, clip):
    expected, c = zero(), batch.columns
    for t in torch.nonzero(batch.mask).flatten().tolist():
        ratio = plain_rl.exp(batch.logprobs[t] - c["actor_logprobs"][t]).detach()
        weight = float(plain_rl.bounded(ratio, clip.low, clip.high))
        term = -weight * c["advantages"][t] * batch.logprobs[t]
        expected = expected + c["weights"][t] * term
    assert_same(batch, policy(losses.weight_clipped, clip, needs_old_logprobs=True), expected)


@quick
@given(batch=microbatches)
def test_reinforce_has_no_ratio(batch):
    terms = batch.columns["weights"] * batch.columns["advantages"] * -batch.logprobs
    expected = sum((terms[t] for t in torch.nonzero(batch.mask).flatten().tolist()), zero())
    assert_same(batch, policy(losses.unclipped, Clip(), needs_old_logprobs=True), expected)


@quick
@given(batch=microbatches, clip=CLIPS)
def test_gspo_has_value_and_gradient_of_the_sequence_objective(batch, clip):
    # The paper's form: one advantage and one weight per sequence, the ratio differentiated
    # through the mean of the sequence's log-ratios.
    expected, c = zero(), batch.columns
    for i, steps in enumerate(batch.sequences()):
        if not steps:
            continue
        advantage, weight = torch.tensor(0.7 * (-1.0) ** i, dtype=torch.float64), 0.3 + i
        c["advantages"][steps], c["weights"][steps] = advantage, weight
        logs = [batch.logprobs[t] - c["actor_logprobs"][t] for t in steps]
        ratio = plain_rl.exp(sum(logs) / len(logs))
        term = plain_rl.ppo_term(ratio, advantage, clip.low, clip.high, clip.dual)
        expected = expected + weight * len(steps) * term
    assert_same(batch, policy(losses.sequence_clipped, clip, needs_old_logprobs=True), expected)


@quick
@given(batch=microbatches, taus=st.sampled_from([(1.0, 1.05), (0.5, 3.0)]))
def test_sapo_gates_the_ratio_by_the_sign_of_the_advantage(batch, taus):
    expected, c = zero(), batch.columns
    for t in torch.nonzero(batch.mask).flatten().tolist():
        ratio = plain_rl.exp(batch.logprobs[t] - c["actor_logprobs"][t])
        expected = expected + c["weights"][t] * plain_rl.sapo_term(ratio, c["advantages"][t], *taus)
    clip = Clip(tau_pos=taus[0], tau_neg=taus[1])
    assert_same(batch, policy(losses.gated, clip, needs_old_logprobs=True), expected)


@quick
@given(batch=microbatches, clip=st.sampled_from([Clip(0.4, 0.4), Clip(0.1, 0.6)]))
def test_gmpo_has_value_and_gradient_of_the_geometric_mean(batch, clip):
    expected, c = zero(), batch.columns
    for i, steps in enumerate(batch.sequences()):
        if not steps:
            continue
        advantage, weight = torch.tensor(0.7 * (-1.0) ** i, dtype=torch.float64), 0.3 + i
        c["advantages"][steps], c["weights"][steps] = advantage, weight
        logs = [batch.logprobs[t] - c["actor_logprobs"][t] for t in steps]
        term = plain_rl.gmpo_term(logs, advantage, clip.low, clip.high)
        expected = expected + weight * len(steps) * term
    assert_same(batch, policy(losses.geometric_clipped, clip, needs_old_logprobs=True), expected)


@quick
@given(batch=microbatches, coef=st.sampled_from([0.5, 1.0]))
def test_kl_cov_penalises_the_marked_tokens(batch, coef):
    expected, c = zero(), batch.columns
    c["penalised"] = (torch.arange(batch.mask.numel()) % 3 == 0).double()
    for t in torch.nonzero(batch.mask).flatten().tolist():
        log = torch.clamp(batch.logprobs[t] - c["actor_logprobs"][t], -20, 20)
        term = -torch.exp(log) * c["advantages"][t] + coef * c["penalised"][t] * log.abs()
        expected = expected + c["weights"][t] * term
    loss = policy(losses.unbounded, Clip(), needs_old_logprobs=True, cov_kl_coef=coef)
    assert_same(batch, loss, expected)


@quick
@given(
    batch=microbatches,
    level=st.sampled_from(["token", "sequence", "geometric"]),
    band=st.sampled_from([(0.5, 2.0), (0.9, 1.1)]),
    weighs=st.booleans(),
)
def test_rejection_drops_what_left_the_sampler_beside_any_weight(batch, level, band, weighs):
    expected, c = zero(), batch.columns
    for steps in batch.sequences():
        logs = [float(c["actor_logprobs"][t] - c["rollout_logprobs"][t]) for t in steps]
        for i, t in enumerate(steps):
            kept = plain_rl.correction_weight(logs, i, "mis", level, band[1], band[0]) != 0
            weight = plain_rl.correction_weight(logs, i, "tis", "token", 2.0, 0.0) if weighs else 1
            ratio = plain_rl.exp(batch.logprobs[t] - c["actor_logprobs"][t])
            term = plain_rl.ppo_term(ratio, c["advantages"][t], 0.2, 0.2)
            expected = expected + c["weights"][t] * kept * weight * term
    rejection = Correction(kind="mis", level=level, cap=band[1], floor=band[0])
    correction = Correction(kind="tis" if weighs else "none")
    kwargs = {"rejection": rejection, "correction": correction, "needs_old_logprobs": True}
    assert_same(batch, policy(losses.clipped, Clip(), **kwargs), expected)


@quick
@given(batch=microbatches, most=st.sampled_from([0.001, 0.1]))
def test_kpop_drops_tokens_by_the_divergence_of_two_outcomes(batch, most):
    expected, c = zero(), batch.columns
    for steps in batch.sequences():
        for t in steps:
            pair = float(c["actor_logprobs"][t]), float(c["rollout_logprobs"][t])
            kept = plain_rl.binary_kl(*pair) <= most
            ratio = plain_rl.exp(batch.logprobs[t] - c["actor_logprobs"][t])
            term = plain_rl.ppo_term(ratio, c["advantages"][t], 0.2, 0.2)
            expected = expected + c["weights"][t] * kept * term
    rejection = settings_for("kpop", rejection_kl=most).rejection_settings
    kwargs = {"rejection": rejection, "needs_old_logprobs": True}
    assert_same(batch, policy(losses.clipped, Clip(), **kwargs), expected)


def test_kpop_keeps_large_ratios_of_rare_tokens_only():
    mask, segments = torch.ones(6, dtype=torch.bool), ListSegments([6])
    p = torch.tensor([1e-3, 0.9, 0.999999999, 1.0, 0.5, 1e-30], dtype=torch.float64)
    q = torch.tensor([1e-2, 0.5, 1.0, 1.0, 0.1, 1.0], dtype=torch.float64)
    rejection = settings_for("kpop").rejection_settings
    _, outside = correction_weights(p.log(), q.log(), mask, segments, rejection)
    assert outside.tolist() == [False, True, False, False, True, True]


def test_a_weighted_kl_term_is_the_divergence_whoever_drew_the_tokens():
    # Over the whole vocabulary drawn by b, value and gradient add up to those of KL(p || q).
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    logq = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64).log_softmax(0)
    logb = torch.tensor([0.5, -0.4, -0.9], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    want = (logp.exp() * (logp - logq)).sum()
    columns = {
        "weights": logb.exp(),
        "advantages": torch.zeros(3, dtype=torch.float64),
        "rollout_logprobs": logb,
        "ref_logprobs": logq,
    }
    loss = policy(losses.clipped, Clip(), kl_coef=1.0, kl_weighted=True)
    got, _ = loss(TokenOutputs(logp, None, None, ListSegments([3])), columns)
    torch.testing.assert_close(got, want, **CLOSE)
    pair = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (got, want)]
    torch.testing.assert_close(*pair, **CLOSE)


@quick
@given(
    batch=microbatches,
    kind=st.sampled_from(["tis", "mis"]),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    band=st.sampled_from([(0.0, 2.0), (0.5, 5.0), (0.9, 1.1)]),
    has_old=st.booleans(),
)
def test_corrections_weigh_the_clipped_objective(batch, kind, level, band, has_old):
    # With old log-probs this is decoupled PPO; without, the proximal policy is the present one.
    expected, c = zero(), batch.columns
    for steps in batch.sequences():
        old = [c["actor_logprobs"][t] if has_old else batch.logprobs[t].detach() for t in steps]
        logs = [float(p - c["rollout_logprobs"][t]) for p, t in zip(old, steps, strict=True)]
        for i, t in enumerate(steps):
            ratio = plain_rl.exp(batch.logprobs[t] - old[i])
            term = plain_rl.ppo_term(ratio, c["advantages"][t], 0.2, 0.2)
            weight = plain_rl.correction_weight(logs, i, kind, level, band[1], band[0])
            expected = expected + c["weights"][t] * weight * term
    correction = Correction(kind=kind, level=level, cap=band[1], floor=band[0])
    loss = policy(losses.clipped, Clip(), correction=correction, needs_old_logprobs=has_old)
    assert_same(batch, loss, expected)


@quick
@given(
    batch=microbatches,
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
)
def test_kl_and_entropy_terms_equal_their_formula(batch, estimator, entropy_coef):
    value, differentiated, c = zero(), zero(), batch.columns
    for t in torch.nonzero(batch.mask).flatten().tolist():
        pair = plain_rl.kl_term(batch.logprobs[t] - c["ref_logprobs"][t], estimator)
        policy_term = -c["advantages"][t] * (batch.logprobs[t] - batch.logprobs[t].detach() + 1)
        rest = policy_term - entropy_coef * batch.entropy[t]
        value = value + c["weights"][t] * (rest + 0.3 * pair[0])
        differentiated = differentiated + c["weights"][t] * (rest + 0.3 * pair[1])
    kwargs = {"kl_coef": 0.3, "kl_estimator": estimator, "entropy_coef": entropy_coef}
    loss = policy(losses.clipped, Clip(), **kwargs)
    assert_same(batch, loss, value.detach() + differentiated - differentiated.detach())


def test_the_mean_gradient_of_each_estimator_is_the_one_documented():
    # Over the whole vocabulary, weighted by probability, the sampled gradients must add up to the
    # gradient of the divergence itself: KL(p || q) for k1 and k2, KL(q || p) for k3.
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    logq = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64).log_softmax(0)
    logp, mask = logits.log_softmax(0), torch.ones(3, dtype=torch.bool)
    reverse = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)
    forward = torch.autograd.grad((logq.exp() * (logq - logp)).sum(), logits, retain_graph=True)
    for estimator, (want,) in {"k1": reverse, "k2": reverse, "k3": forward}.items():
        sampled = (logp.exp().detach() * losses.estimate_kl(logp, logq, mask, estimator)).sum()
        (got,) = torch.autograd.grad(sampled, logits, retain_graph=True)
        torch.testing.assert_close(got, want, **CLOSE)


@quick
@given(batch=microbatches, eps=st.sampled_from([None, 0.2, 1.0]), coef=st.sampled_from([1.0, 0.5]))
def test_value_loss_is_the_larger_of_plain_and_clipped_error(batch, eps, coef):
    expected, c = zero(), batch.columns
    for t in torch.nonzero(batch.mask).flatten().tolist():
        error = (batch.values[t] - c["returns"][t]) ** 2
        if eps is not None:
            near = c["values"][t] + torch.clamp(batch.values[t] - c["values"][t], -eps, eps)
            error = torch.maximum(error, (near - c["returns"][t]) ** 2)
        expected = expected + c["weights"][t] * coef * error / 2
    assert_same(batch, ValueLoss(value_coef=coef, eps_clip_value=eps), expected)


@quick
@given(batch=microbatches)
def test_sft_is_the_weighted_negative_log_likelihood(batch):
    expected = zero()
    for t in torch.nonzero(batch.mask).flatten().tolist():
        expected = expected - batch.columns["weights"][t] * batch.logprobs[t]
    assert_same(batch, SftLoss(), expected)


SURROGATES = [
    losses.clipped,
    losses.sequence_clipped,
    losses.weight_clipped,
    losses.gated,
    losses.geometric_clipped,
    losses.unbounded,
    losses.unclipped,
]
EVERY_LOSS = [
    *(
        policy(
            surrogate,
            Clip(0.2, 0.28, 3.0),
            correction=Correction(kind=kind, level=level),
            kl_coef=0.1,
            kl_estimator=estimator,
            entropy_coef=0.01,
            needs_old_logprobs=True,
        )
        for surrogate in SURROGATES
        for kind, level, estimator in (
            ("tis", "token", "k3"),
            ("mis", "sequence", "k2"),
            ("tis", "geometric", "k1"),
            ("sampler_ratio", "token", "k3"),
        )
    ),
    ValueLoss(eps_clip_value=0.2),
    SftLoss(),
]


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("wild", [math.inf, -math.inf, math.nan])
def test_untrained_tokens_reach_neither_value_nor_gradient(loss, wild):
    batch = Microbatch([5, 0, 4, 3], 3, 0.1)
    batch.columns["weights"][:5] = 0  # one sequence without any trained token
    off = batch.columns["weights"] == 0
    reference, _ = loss(batch.outputs(), batch.columns)
    expected = [torch.where(off, 0.0, g) for g in grads(reference, batch.leaves())]
    for leaf in batch.leaves():
        leaf.data[off] = wild
    for name, column in batch.columns.items():
        column[off] = 0 if name == "weights" else wild
    value, stats = loss(batch.outputs(), batch.columns)
    assert value == reference.detach()
    assert all(torch.isfinite(stat) for stat in stats.values())
    for got, want in zip(grads(value, batch.leaves()), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("loss", EVERY_LOSS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [80.0, -80.0])
def test_extreme_ratios_stay_finite(loss, dtype, far):
    batch = Microbatch([4, 3], 1, 0.0)
    batch.columns["weights"] += 0.1
    columns = {name: column.to(dtype) for name, column in batch.columns.items()}
    for name in ("actor_logprobs", "rollout_logprobs", "ref_logprobs"):
        columns[name] = columns[name] + far
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in batch.leaves()]
    value, stats = loss(TokenOutputs(*leaves, ListSegments([4, 3])), columns)
    assert value.dtype == dtype and torch.isfinite(value)
    assert all(torch.isfinite(g).all() for g in grads(value, leaves))
    assert all(torch.isfinite(stat) for stat in stats.values())


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_an_empty_microbatch_costs_nothing(loss):
    batch = Microbatch([], 0, 1.0)
    value, _ = loss(batch.outputs(), batch.columns)
    assert value == 0 and value.requires_grad


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_without_old_log_probs_the_gradient_is_reinforce(surrogate):
    batch = Microbatch([4, 0, 6], 7, 1.0)
    batch.columns["actor_logprobs"] = batch.logprobs.detach().clone()
    c = {name: batch.columns[name] for name in ("weights", "advantages")}
    value, stats = policy(surrogate, Clip(3e-4, 4e-4))(batch.outputs(), c)
    (got,) = torch.autograd.grad(value, batch.logprobs)
    torch.testing.assert_close(got, -c["weights"] * c["advantages"] * batch.mask, **CLOSE)
    assert stats["clipped_tokens"] == 0 and stats["tokens"] == batch.mask.sum()
    # The same as with old log-probs that are those of the policy itself.
    loss = policy(surrogate, Clip(3e-4, 4e-4), needs_old_logprobs=True)
    (again,) = torch.autograd.grad(loss(batch.outputs(), batch.columns)[0], batch.logprobs)
    assert torch.equal(got, again)


def test_old_log_probs_are_used_whenever_they_are_there():
    batch = Microbatch([6], 2, 1.0)
    loss = policy(losses.clipped, Clip())
    assert "actor_logprobs" not in loss.columns
    with_old, _ = loss(batch.outputs(), batch.columns)
    del batch.columns["actor_logprobs"]
    without, _ = loss(batch.outputs(), batch.columns)
    assert with_old != without


@pytest.mark.parametrize("loss", EVERY_LOSS)
def test_a_missing_column_is_named(loss):
    batch = Microbatch([3], 0, 1.0)
    del batch.columns[loss.columns[-1]]
    with pytest.raises(RunError, match=f"reads the column {loss.columns[-1]}"):
        loss(batch.outputs(), batch.columns)


def test_correction_weights_carry_no_gradient():
    proximal = torch.tensor([-1.0, -2.0], requires_grad=True)
    mask, segments = torch.tensor([True, True]), ListSegments([2])
    for level in ("token", "sequence", "geometric"):
        correction = Correction(kind="tis", level=level)
        weights, _ = correction_weights(proximal, proximal - 0.1, mask, segments, correction)
        assert not weights.requires_grad


def test_stats_count_what_was_clipped_and_corrected():
    columns = {
        "weights": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "advantages": torch.tensor([1.0, -1.0, 1.0, 1.0]),
        "actor_logprobs": torch.tensor([-1.0, -1.0, -1.0, -9.0]),
        "rollout_logprobs": torch.tensor([-3.0, -1.0, -1.0, -9.0]),
    }
    logprobs = torch.tensor([0.0, 0.0, -1.0, 0.0], requires_grad=True)
    loss = policy(losses.clipped, Clip(), kind="tis", needs_old_logprobs=True)
    _, stats = loss(TokenOutputs(logprobs, None, None, ListSegments([4])), columns)
    assert stats["tokens"] == 3
    assert stats["clipped_tokens"] == 1  # token 0; a growing ratio with A < 0 is not clipped
    assert stats["corrected_tokens"] == 1 and stats["correction_weight"] == 2.0 + 1.0 + 1.0
    torch.testing.assert_close(stats["policy_loss"], torch.tensor(-2 * 1.2 + math.e - 1.0))
