"""Whole SFT runs on CPU."""

import pytest
from conftest import steps_of, values_of

from pentad.telemetry.steps import read_lines


def test_sft_learns_and_repeats(lab, task):
    settings = ["total_train_epochs=8", f"valid_dataset.path={task / 'sft.jsonl'}"]
    one, other = lab.sft(*settings), lab.sft(*settings)
    assert values_of(one) == values_of(other)
    losses = [record["loss"] for record in steps_of(one)]
    assert len(losses) == 64
    assert losses[-1] < 0.7 * losses[0]
    evals = read_lines(one.records / "evals.jsonl")
    assert evals[-1]["loss"] < 0.7 * evals[0]["loss"]


def test_held_out_loss_before_training_is_the_loss_of_step_1_on_the_same_rows(lab, task):
    summary = lab.sft(
        "train_dataset.batch_size=64",
        "total_train_steps=1",
        f"valid_dataset.path={task / 'sft.jsonl'}",
    )
    (step,) = steps_of(summary)
    assert summary.evals[0]["loss"] == pytest.approx(step["loss"], rel=1e-5)


def test_rl_starts_from_what_sft_saved(lab):
    warm = lab.sft("total_train_steps=40")
    cold_reward = steps_of(lab.train())[0]["rl"]["reward_mean"]
    summary = lab.train(f"actor.path={warm.model}", "actor.init_from_scratch=false")
    assert steps_of(summary)[0]["rl"]["reward_mean"] > cold_reward + 0.05
