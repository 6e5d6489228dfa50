"""Off-policy data: what a run chooses by default, held against verl's formulas as plain loops."""

import math

import plain_rl
import pytest
import torch
from ragged_batches import ListSegments
from sections import settings_for

from pentad.core.errors import UserError
from pentad.core.types import TokenOutputs
from pentad.planner.prepare import prepare
from pentad.rl.algorithms import build_policy_loss
from pentad.rl.facts import FACTS
from pentad.rl.metrics import loss_metrics
from pentad.rl.shaping import proximal_shares

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
"""fp64, a few dozen terms in another order."""
LENGTHS = [7, 1, 12, 5, 9]
STALE = ["mode=hybrid", "max_staleness=2"]
TWICE = ["updates_per_batch=2"]


class Stale:
    """A microbatch whose sampler is far away: log-ratios with a standard deviation of 1.5."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def normal():
            return torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)

        self.logprobs = (-normal().abs() - 0.1).requires_grad_()
        weights = normal().abs() * (normal() > -0.8)
        self.columns = {
            "weights": weights,
            "advantages": normal(),
            "rollout_logprobs": (self.logprobs + 1.5 * normal()).detach(),
            "actor_logprobs": (self.logprobs + 0.3 * normal()).detach(),
        }

    def gradient(self, loss):
        outputs = TokenOutputs(self.logprobs, None, None, ListSegments(LENGTHS))
        value, _ = loss(outputs, {name: self.columns[name] for name in loss.columns})
        return value.detach(), torch.autograd.grad(value, self.logprobs)[0]

    def expected(self, term):
        """Sum over the trained tokens of weight * term(t, the sequence's tokens, index)."""
        total, start = 0 * self.logprobs.sum(), 0
        for length in LENGTHS:
            steps = [t for t in range(start, start + length) if self.columns["weights"][t] != 0]
            for i, t in enumerate(steps):
                total = total + self.columns["weights"][t] * term(t, steps, i)
            start += length
        return total.detach(), torch.autograd.grad(total, self.logprobs)[0]


def chosen(*overrides):
    """The settings that a run with these overrides trains by, and the notes it shows."""
    recipe = ["actor.path=Qwen/Qwen3-0.6B", "teacher.path=Qwen/Qwen3-0.6B", *overrides]
    config, notes = prepare(None, recipe, "plan")
    return config.algorithm, notes


def assert_equal(got, want):
    torch.testing.assert_close(got[0], want[0], **CLOSE)
    torch.testing.assert_close(got[1], want[1], **CLOSE)


def band(settings):
    clip = settings.clip
    return clip.low, clip.high, math.inf if clip.dual is None else clip.dual


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("asked", [STALE, TWICE])
def test_left_open_a_correction_is_chosen_and_told(name, asked):
    if name == "kl_cov" and asked is STALE:
        return  # it needs several updates a batch
    settings, notes = chosen(f"algorithm.name={name}", *asked)
    wanted = {"cispo": "sampler_ratio", "m2po": "sampler_ratio", "icepop": "mis"}.get(name, "tis")
    assert settings.correction == wanted
    assert settings.correction_level == ("geometric" if name in ("gspo", "gmpo") else "token")
    key = asked[-1].replace("=", " = ")
    note = f"algorithm.correction = {wanted}: {key}, and algorithm.name = {name}"
    assert note in notes
    assert "rollout_logprobs" in build_policy_loss(settings).columns
    if name != "kl_cov":
        always = FACTS[name].defaults.get("correction", "none")
        assert chosen(f"algorithm.name={name}")[0].correction == always


@pytest.mark.parametrize("asked", [STALE, TWICE])
def test_an_explicit_none_is_refused_unless_forced(asked):
    with pytest.raises(UserError, match=r"algorithm.correction = none: .*allow_uncorrected=true"):
        chosen(*asked, "algorithm.correction=none")
    settings, notes = chosen(*asked, "algorithm.correction=none", "algorithm.allow_uncorrected=1")
    assert settings.correction == "none" and not any("correction" in note for note in notes)


def test_details_given_without_a_kind_are_those_of_tis():
    settings, _ = chosen("algorithm.name=cispo", "algorithm.correction_cap=5", *STALE)
    assert (settings.correction, settings.correction_cap) == ("tis", 5)
    settings, _ = chosen("algorithm.name=icepop", "algorithm.correction_cap=3", *STALE)
    assert (settings.correction, settings.correction_cap) == ("mis", 3)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "ppo", "distill"])
def test_the_default_of_a_stale_run_is_verls_truncated_weight(name):
    settings, _ = chosen(f"algorithm.name={name}", *STALE)
    batch = Stale()
    c = batch.columns

    def term(t, steps, i):
        own = batch.logprobs[t].detach()  # one update: the old policy is the present one
        logs = [float(batch.logprobs[u].detach() - c["rollout_logprobs"][u]) for u in steps]
        weight = plain_rl.verl_weight(logs, i, "token", 2.0)
        args = (batch.logprobs[t], own, c["advantages"][t], *band(settings))
        return plain_rl.verl_decoupled(*args, weight)

    got = batch.gradient(build_policy_loss(settings))
    assert_equal(got, batch.expected(term))
    uncorrected = batch.gradient(build_policy_loss(settings_for(name)))[1]
    assert (got[1] - uncorrected).norm() > 0.5 * got[1].norm()


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo"])
def test_several_updates_are_verls_decoupled_mode(name):
    settings, _ = chosen(f"algorithm.name={name}", *TWICE)
    batch = Stale(1)
    c = batch.columns

    def term(t, steps, i):
        logs = [float(c["actor_logprobs"][u] - c["rollout_logprobs"][u]) for u in steps]
        weight = plain_rl.verl_weight(logs, i, "token", 2.0)
        args = (batch.logprobs[t], c["actor_logprobs"][t], c["advantages"][t], *band(settings))
        return plain_rl.verl_decoupled(*args, weight)

    assert_equal(batch.gradient(build_policy_loss(settings, num_updates=2)), batch.expected(term))


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "ppo"])
@pytest.mark.parametrize("num_updates", [1, 3])
def test_sampler_ratio_is_verls_bypass_mode(name, num_updates):
    settings, _ = chosen(f"algorithm.name={name}", "algorithm.correction=sampler_ratio", *STALE)
    batch = Stale(2)
    c = batch.columns

    def term(t, steps, i):
        args = (batch.logprobs[t], c["rollout_logprobs"][t], c["advantages"][t])
        return plain_rl.verl_bypass(*args, *band(settings))

    loss = build_policy_loss(settings, num_updates=num_updates)
    assert "actor_logprobs" not in loss.columns, "the forward for old log-probs is not needed"
    assert_equal(batch.gradient(loss), batch.expected(term))


def test_cispo_clips_its_weight_against_the_sampler():
    settings, _ = chosen("algorithm.name=cispo", *STALE)
    batch = Stale(3)
    c = batch.columns

    def term(t, steps, i):
        ratio = plain_rl.exp((batch.logprobs[t] - c["rollout_logprobs"][t]).detach())
        return -ratio.clamp(0, 4) * c["advantages"][t] * batch.logprobs[t]

    assert_equal(batch.gradient(build_policy_loss(settings)), batch.expected(term))


def test_gspo_weighs_sequences_by_its_own_ratio():
    settings, _ = chosen("algorithm.name=gspo", *STALE)
    batch = Stale(4)
    c = batch.columns

    def term(t, steps, i):
        logs = [float(batch.logprobs[u].detach() - c["rollout_logprobs"][u]) for u in steps]
        weight = min(math.exp(sum(logs) / len(logs)), 2.0)
        return -weight * c["advantages"][t] * (1 + batch.logprobs[t] - batch.logprobs[t].detach())

    assert_equal(batch.gradient(build_policy_loss(settings)), batch.expected(term))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("num_updates", [1, 3])
def test_reinforce_is_weighed_by_the_current_policy_over_the_sampler(level, num_updates):
    settings, _ = chosen("algorithm.name=reinforce", f"algorithm.correction_level={level}", *STALE)
    batch = Stale(5)
    c = batch.columns

    def term(t, steps, i):
        logs = [float(batch.logprobs[u].detach() - c["rollout_logprobs"][u]) for u in steps]
        weight = plain_rl.verl_weight(logs, i, level, 2.0)
        return plain_rl.verl_bypass_reinforce(batch.logprobs[t], c["advantages"][t], weight)

    loss = build_policy_loss(settings, num_updates=num_updates)
    # Rows that carry old log-probs all the same do not change it.
    loss.columns = (*loss.columns, "actor_logprobs")
    assert_equal(batch.gradient(loss), batch.expected(term))


CURRENT = 7
APPROXIMATED = [*STALE, *TWICE, "algorithm.prox_logp_method=loglinear"]


def aged(batch):
    """Adds the versions of tokens, from long ago up to the current one."""
    generator = torch.Generator().manual_seed(9)
    versions = torch.randint(0, CURRENT + 1, (sum(LENGTHS),), generator=generator)
    batch.columns["proximal_share"] = proximal_shares(versions, CURRENT)
    return versions.tolist()


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "gspo"])
@pytest.mark.parametrize("asked", [TWICE, ["algorithm.decoupled=true"]])
def test_old_log_probs_interpolated_by_age_are_areals(name, asked):
    settings, _ = chosen(
        f"algorithm.name={name}", *STALE, *asked, "algorithm.prox_logp_method=loglinear"
    )
    batch = Stale(6)
    versions, c = aged(batch), batch.columns
    now = batch.logprobs.detach()

    def old(t):
        return plain_rl.areal_proximal(c["rollout_logprobs"][t], now[t], versions[t], CURRENT)

    def term(t, steps, i):
        logs = [float(old(u) - c["rollout_logprobs"][u]) for u in steps]
        args = (batch.logprobs[t], old(t), c["advantages"][t], *band(settings))
        if name != "gspo":
            return plain_rl.verl_decoupled(*args, plain_rl.verl_weight(logs, i, "token", 2.0))
        log = sum(logs) / len(logs) if settings.correction_level == "geometric" else logs[i]
        weight = min(math.exp(log), 2.0)
        mean = sum(float(now[u] - old(u)) for u in steps) / len(steps)
        args = (batch.logprobs[t] - now[t] + mean, torch.zeros(()), c["advantages"][t])
        return weight * plain_rl.verl_vanilla(*args, *band(settings))

    loss = build_policy_loss(settings, num_updates=2)
    assert "actor_logprobs" not in loss.columns, "the forward for old log-probs is not needed"
    assert_equal(batch.gradient(loss), batch.expected(term))


def test_rejection_compares_the_interpolated_policy_with_the_sampler():
    settings, _ = chosen(*APPROXIMATED, "algorithm.rejection=token")
    batch = Stale(6)
    versions, c = aged(batch), batch.columns
    now, dropped = batch.logprobs.detach(), 0
    for t in range(sum(LENGTHS)):
        old = plain_rl.areal_proximal(c["rollout_logprobs"][t], now[t], versions[t], CURRENT)
        ratio = math.exp(old - c["rollout_logprobs"][t])
        dropped += bool(c["weights"][t] != 0 and not 0.5 <= ratio <= 2.0)
    loss = build_policy_loss(settings, num_updates=2)
    outputs = TokenOutputs(batch.logprobs, None, None, ListSegments(LENGTHS))
    _, stats = loss(outputs, {name: c[name] for name in loss.columns})
    assert int(stats["rejected_tokens"]) == dropped > 0


def test_metrics_train_by_recomputed_log_probs_and_report_the_error():
    plain, _ = chosen(*STALE, *TWICE)
    settings, _ = chosen(*STALE, *TWICE, "algorithm.prox_logp_method=metrics")
    batch = Stale(6)
    versions, c = aged(batch), batch.columns
    loss = build_policy_loss(settings, num_updates=2)
    exact = build_policy_loss(plain, num_updates=2)
    assert all(map(torch.equal, batch.gradient(loss), batch.gradient(exact)))
    outputs = TokenOutputs(batch.logprobs, None, None, ListSegments(LENGTHS))
    _, stats = loss(outputs, {name: c[name] for name in loss.columns})
    errors = []
    for t in (c["weights"] != 0).nonzero().flatten().tolist():
        drawn, now = c["rollout_logprobs"][t], batch.logprobs[t].detach()
        old = plain_rl.areal_proximal(drawn, now, versions[t], CURRENT)
        errors.append(abs(float(old - c["actor_logprobs"][t])))
    found = loss_metrics({name: float(x) for name, x in stats.items()}, settings)
    assert found["prox_logp_error"] == pytest.approx(sum(errors) / len(errors), rel=1e-9)
    assert loss_metrics({"tokens": 1.0}, plain)["prox_logp_error"] is None


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        (STALE, "updates_per_batch = 1 needs no old log-probs"),
        (TWICE, "max_staleness = 0 makes all of age 0"),
        ([*STALE, *TWICE, "algorithm.correction=sampler_ratio"], "against the sampler's log-probs"),
        ([*STALE, "algorithm.name=reinforce"], "its loss has no ratio"),
        ([*STALE, *TWICE, "algorithm.name=clip_cov"], "recomputed before the batch"),
        ([*TWICE, "only=train", "groups_from=/nowhere"], "the samples of another run"),
    ],
)
@pytest.mark.parametrize("method", ["loglinear", "metrics"])
def test_interpolation_is_refused_where_nothing_is_recomputed(asked, rule, method):
    with pytest.raises(UserError) as failure:
        chosen(*asked, f"algorithm.prox_logp_method={method}")
    (found,) = [p for p in map(str, failure.value.problems) if "prox_logp_method" in p]
    assert rule in found and f"prox_logp_method = {method}" in found
