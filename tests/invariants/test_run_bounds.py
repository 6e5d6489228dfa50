"""Runs that train something else than they should end by themselves; others go on."""

import math

import pytest
from run_lab import steps_of

from pentad.core.errors import RunError
from pentad.engine.engine import Engine
from pentad.infer.sampler import EmbeddedSampler

LONG = ("total_train_steps=40", "total_train_epochs=3", "actor.optimizer.lr=1e-2")


def deafen(monkeypatch):
    """The sampler says that it took new weights, and goes on with the first ones."""
    real, first = EmbeddedSampler.install, []

    async def install(self, version, weights):
        pairs = [(name, tensor.clone()) for name, tensor in weights]
        first.extend(pairs if not first else ())
        receipt = await real(self, version, pairs)
        await real(self, version, first)
        return receipt

    monkeypatch.setattr(EmbeddedSampler, "install", install)


def flatten_logprobs(monkeypatch, value):
    """After the self-test the sampler reports one number for every token."""
    real = EmbeddedSampler.generate

    async def generate(self, request, on_token=None):
        answers = await real(self, request, on_token)
        if not request.id.startswith("selftest"):
            for answer in answers:
                answer.logprobs = [value] * len(answer.logprobs)
        return answers

    monkeypatch.setattr(EmbeddedSampler, "generate", generate)


def steps_in(lab, trial):
    (file,) = lab.fileroot.rglob(f"{trial}/steps.jsonl")
    return file.read_text().count("\n")


@pytest.mark.parametrize("more", [(), ("mode=hybrid", "max_staleness=1")])
def test_a_sampler_that_ignores_updates_ends_the_run(lab, monkeypatch, more):
    deafen(monkeypatch)
    with pytest.raises(RunError, match=r"guards.max_logprob_gap = 0.3.*takes published weights"):
        lab.train(*LONG, *more, trial="deaf")
    assert 5 <= steps_in(lab, "deaf") < 40


def test_constant_log_probs_end_the_run_after_the_patience_given(lab, monkeypatch):
    flatten_logprobs(monkeypatch, -1.5)
    with pytest.raises(RunError, match="step 3: the sampler reports one log-prob, -1.5, for all"):
        lab.train(*LONG, "guards.patience_steps=3", trial="flat")
    assert steps_in(lab, "flat") == 3


def test_a_run_far_off_policy_on_purpose_goes_on(lab):
    summary = lab.train(*LONG, "mode=async", "max_staleness=4")
    gaps = [record["rl"]["logprob_diff_mean"] for record in steps_of(summary)]
    assert len(gaps) == 40 and max(gaps) > 0.3, "the data were hardly off-policy"


def spoil(monkeypatch, is_bad):
    """The gradient of some steps is not finite."""
    real, count = Engine._gradients, []

    def gradients(self):
        found = real(self)
        count.append(None)
        if is_bad(len(count)):
            for gradient in found if isinstance(found, list) else found.values():
                gradient.fill_(math.nan)
        return found

    monkeypatch.setattr(Engine, "_gradients", gradients)


def test_gradients_that_are_not_finite_end_the_run(lab, monkeypatch):
    spoil(monkeypatch, lambda step: step > 2)
    with pytest.raises(
        RunError, match="step 7: no usable gradient .*patience_steps = 5 steps in a row"
    ):
        lab.train(*LONG)


def test_gradients_that_are_not_finite_now_and_then_end_the_run_by_their_share(lab, monkeypatch):
    spoil(monkeypatch, lambda step: step % 4)
    with pytest.raises(
        RunError, match="step 20: .* in 15 of the last 20 steps, more than guards.max_"
    ):
        lab.train(*LONG)


def test_a_rare_bad_gradient_is_no_reason_to_stop(lab, monkeypatch):
    spoil(monkeypatch, lambda step: step % 4 == 0)
    records = steps_of(lab.train(*LONG, "total_train_steps=24"))
    assert sum(record["update_skipped"] for record in records) == 6


def test_sft_has_the_same_bound(lab, monkeypatch):
    spoil(monkeypatch, lambda step: True)
    with pytest.raises(RunError, match="step 5: no usable gradient"):
        lab.sft("total_train_steps=8", "total_train_epochs=9")


def test_rewards_of_absurd_size_end_the_run(lab, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text("def huge(completion): return 1e300 * len(completion)\n")
    with pytest.raises(RunError, match="algorithm.max_reward = 1e[+]06 stops the run"):
        lab.train(f"reward.fn={file}:huge")
    steps = steps_of(lab.train(f"reward.fn={file}:huge", "algorithm.reward_clip=1"))
    assert len(steps) == 3
