"""Runs that train something else than they should end by themselves; others go on."""

import math
from functools import partial

import pytest
from run_lab import steps_of

from pentad.core.errors import RunError
from pentad.engine.held import HeldModel
from pentad.infer.sampler import EmbeddedSampler
from pentad.rollout.replicas import Fleet
from pentad.trainer.sampling import evaluate
from pentad.trainer.sampling.samplers import SamplerOpener

LONG = ("total_train_steps=40", "total_train_epochs=3", "actor.optimizer.lr=1e-2")


def deafen(monkeypatch, hears=lambda sampler, version: False):
    """The sampler says that it took new weights, and goes on with those before."""
    real, before = EmbeddedSampler.install, {}

    async def install(self, version, weights):
        pairs = [(name, tensor.clone()) for name, tensor in weights]
        receipt = await real(self, version, pairs)
        if id(self) not in before or hears(self, version):
            before[id(self)] = pairs
        await real(self, version, before[id(self)])
        return receipt

    monkeypatch.setattr(EmbeddedSampler, "install", install)


def double(monkeypatch):
    """Two samplers where a run has one."""
    opened = []

    real = SamplerOpener.open

    async def open_two(opener, *given):
        first = await real(opener, *given)
        second = await real(opener, *given)
        opened.extend([*first.values(), *second.values()])
        return {"one": opened[0], "other": opened[1]}

    monkeypatch.setattr(SamplerOpener, "open", open_two)
    return opened


def change_logprobs(monkeypatch, change):
    """After the self-test the sampler reports other log-probs than it drew with."""
    real = EmbeddedSampler.generate

    async def generate(self, request, on_token=None):
        answers = await real(self, request, on_token)
        if not request.id.startswith("selftest"):
            for answer in answers:
                answer.logprobs = [change(value) for value in answer.logprobs]
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


def test_a_sampler_that_ignores_every_second_update_ends_the_run(lab, monkeypatch):
    deafen(monkeypatch, lambda sampler, version: version % 2 == 0)
    with pytest.raises(RunError, match="in 2 of the last 4 comparisons.*takes published weights"):
        lab.train(*LONG, "actor.optimizer.lr=5e-2", "guards.patience_steps=2", trial="half-deaf")
    assert steps_in(lab, "half-deaf") < 40


def test_one_of_two_samplers_that_ignores_updates_is_named(lab, monkeypatch):
    opened = double(monkeypatch)
    deafen(monkeypatch, lambda sampler, version: sampler is opened[0])
    with pytest.raises(RunError, match="that sampler 1 drew for the comparison"):
        lab.train(*LONG, "guards.patience_steps=2", "guards.max_logprob_gap=0.6", trial="one-deaf")
    assert steps_in(lab, "one-deaf") < 40


def test_two_samplers_that_take_updates_go_on(lab, monkeypatch):
    double(monkeypatch)
    summary = lab.train(*LONG, "total_train_steps=12", "guards.patience_steps=1")
    assert len(steps_of(summary)) == 12


@pytest.mark.parametrize("more", [(), ("mode=hybrid", "max_staleness=1")])
def test_log_probs_that_are_all_shifted_end_the_run(lab, monkeypatch, more):
    change_logprobs(monkeypatch, lambda value: value - 0.2)
    with pytest.raises(RunError, match=r"differ by 0.6 per log-prob .* guards.max_logprob_gap"):
        lab.train(*LONG, "guards.patience_steps=3", *more)


def test_log_probs_that_are_no_numbers_end_the_run(lab, monkeypatch):
    change_logprobs(monkeypatch, lambda value: math.nan)
    monkeypatch.setattr(evaluate, "Fleet", partial(Fleet, patience_s=2.0))
    with pytest.raises(RunError, match="log-prob nan is not a finite number"):
        lab.train(*LONG, "rollout.max_retries=0")


def test_constant_log_probs_end_the_run_after_the_patience_given(lab, monkeypatch):
    change_logprobs(monkeypatch, lambda value: -1.5)
    with pytest.raises(RunError, match="step 3: the sampler reports one log-prob, -1.5, for all"):
        lab.train(*LONG, "guards.patience_steps=3", trial="flat")
    assert steps_in(lab, "flat") == 3


def test_a_run_far_off_policy_on_purpose_goes_on(lab):
    summary = lab.train(*LONG, "mode=async", "max_staleness=4")
    gaps = [record["rl"]["logprob_diff_mean"] for record in steps_of(summary)]
    assert len(gaps) == 40 and max(gaps) > 0.3, "the data were hardly off-policy"


def spoil(monkeypatch, is_bad):
    """The gradient of some steps is not finite."""
    real, count = HeldModel.gradients, []

    def gradients(self):
        found = real(self)
        count.append(None)
        if is_bad(len(count)):
            for gradient in found.values():
                gradient.fill_(math.nan)
        return found

    monkeypatch.setattr(HeldModel, "gradients", gradients)


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
