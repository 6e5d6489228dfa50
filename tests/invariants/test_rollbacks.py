"""Runs whose weights give no finite gradient go back to a checkpoint, as often as they may."""

import math

import pytest
import torch
from run_lab import steps_of

from pentad.core.errors import RunError
from pentad.engine.engine import Engine
from pentad.engine.held import HeldModel
from pentad.trainer.rank.example_service import ExampleService

WORDS = ("guards.patience_steps=2", "recover.freq_steps=2", "saver.mode=sync")
POISON = 2.0**-20
LENGTH = ("total_train_steps=10", "total_train_epochs=9")


def poison(monkeypatch, after: int):
    """After a step one weight has a value with which no gradient is finite, as long as it is there.
    What the weights were after each step."""
    real, plain, seen = Engine.end_step, HeldModel.gradients, {}

    def first(held):
        return next(iter(held.parameters.values())).detach().view(-1)

    def end_step(self):
        result = real(self)
        if self.num_steps == after:
            first(self.held)[0] = POISON
        seen[self.num_steps] = {name: x.clone() for name, x in self.masters.items()}
        return result

    def gradients(self):
        found = plain(self)
        if first(self)[0] == POISON:
            next(iter(found.values())).fill_(math.nan)
        return found

    monkeypatch.setattr(Engine, "end_step", end_step)
    monkeypatch.setattr(HeldModel, "gradients", gradients)
    return seen


def check_records(records):
    """The checkpoint of step 4 holds the poison, and the older one helps."""
    assert [r["step"] for r in records if r["update_skipped"]] == [5, 6, 7, 8]
    back = {r["step"]: r["rolled_back_to"] for r in records if r["rolled_back_to"] is not None}
    assert back == {6: 4, 8: 2}
    assert [r["num_skipped"] for r in records] == [0, 0, 0, 0, 1, 2, 3, 4, 4, 4]
    lrs = [r["lr"] for r in records]
    assert lrs == sorted(lrs, reverse=True) and len(set(lrs)) == 10, "it follows the steps"
    started = records[0]["time_s"] - records[0]["wall_clock_ms"] / 1e3 / records[0]["infra"]["ettr"]
    worth = sum(records[step - 1]["wall_clock_ms"] for step in (1, 2, 9, 10)) / 1e3
    ettr = worth / (records[-1]["time_s"] - started)
    assert records[-1]["infra"]["ettr"] == pytest.approx(ettr, rel=1e-3), "3 and 4 are lost"


def test_examples_go_on_from_a_checkpoint_with_the_data_that_follow(lab, monkeypatch):
    seen = poison(monkeypatch, after=4)
    begun, real, steps = {}, Engine.begin_step, []
    plain = ExampleService.step

    def begin_step(self):
        begun[self.num_steps] = {name: x.clone() for name, x in self.masters.items()}
        real(self)

    def step(self, step):
        steps.append(step)
        return plain(self, step)

    monkeypatch.setattr(Engine, "begin_step", begin_step)
    monkeypatch.setattr(ExampleService, "step", step)
    summary = lab.sft(*WORDS, *LENGTH, "actor.optimizer.lr_scheduler_type=linear")
    check_records(steps_of(summary))
    assert steps == list(range(10)), "no batch twice"
    assert all(torch.equal(begun[8][name], x) for name, x in seen[2].items()), "bitwise"
    said = (summary.records / "log.txt").read_text()
    assert "The weights and the optimizer state of step 2 are restored (rollback 2 of" in said


def test_a_policy_goes_on_from_a_checkpoint_and_samplers_with_it(lab, monkeypatch):
    poison(monkeypatch, after=4)
    more = ("mode=hybrid", "max_staleness=1")
    summary = lab.train(*WORDS, *LENGTH, *more, "actor.optimizer.lr_scheduler_type=linear")
    records = steps_of(summary)
    check_records(records)
    assert [r["version"] for r in records] == list(range(1, 11))
    assert records[-1]["rl"]["logprob_diff_mean"] < 1, "samplers have the weights put back"


def test_rollbacks_that_are_used_up_end_the_run(lab, monkeypatch):
    poison(monkeypatch, after=4)
    with pytest.raises(RunError, match="step 8: no usable gradient .* in a row, after 1 rollbacks"):
        lab.sft(*WORDS, *LENGTH, "guards.max_rollbacks=1")


def test_a_run_without_checkpoints_ends(lab, monkeypatch):
    poison(monkeypatch, after=1)
    with pytest.raises(RunError, match="step 3: no usable gradient .* 2 steps in a row: nothing"):
        lab.sft(*WORDS, *LENGTH)
