"""Runs whose old log-probs are interpolated by the age of tokens, without a forward pass."""

import numpy as np
import pytest
from run_lab import steps_of, values_of
from test_rl_runs import assert_same_weights, weights_of
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.trainer.rank import update

AGED = (
    *("rollout.oversample=2", "rollout.max_carries=4", "gconfig.max_new_tokens=40"),
    *(
        "gconfig.n_samples=2",
        "updates_per_batch=2",
        "total_train_steps=8",
        "actor.optimizer.lr=1e-2",
    ),
)
"""Over-sampled groups have tokens of several versions, and runs are repeatable."""


def method(name):
    return f"algorithm.prox_logp_method={name}"


@pytest.fixture
def forwards(monkeypatch):
    """The columns that forward passes of a run's batches wrote."""
    calls, plain = [], update._write
    monkeypatch.setattr(update, "_write", lambda *given: (calls.append(given[1]), plain(*given))[1])
    return calls


@pytest.fixture
def shares(monkeypatch):
    """Shares of the current policy in the rows of a run."""
    seen, plain = [], update.BatchUpdate._rows_of

    def rows_of(self, groups):
        rows = plain(self, groups)
        seen.extend(row.columns["proximal_share"].numpy() for row in rows)
        return rows

    monkeypatch.setattr(update.BatchUpdate, "_rows_of", rows_of)
    return seen


def test_interpolation_saves_the_forward_pass_and_trains_the_same_tokens(lab, forwards, shares):
    run = lab.train(*AGED, method("loglinear"))
    assert not forwards, "nothing is recomputed"
    found = np.unique(np.concatenate(shares))
    ages = {int(lag) for step in steps_of(run) for lag in step["rl"]["staleness"]}
    assert max(ages) >= 2
    want = sorted({0.0, *((age - 1) / age for age in ages if age)})
    np.testing.assert_allclose(found, want, atol=1e-7)
    assert values_of(lab.train(*AGED, method("loglinear"))) == values_of(run)
    for step in steps_of(run):
        assert step["grad_norm"] > 0 and step["rl"]["prox_logp_error"] is None


def test_metrics_change_no_number_and_report_the_error(lab, forwards):
    plain = lab.train(*AGED)
    assert forwards == 8 * ["actor_logprobs"]
    measured = lab.train(*AGED, method("metrics"))
    assert forwards == 16 * ["actor_logprobs"]
    assert_same_weights(measured, plain)
    errors = [step["rl"].pop("prox_logp_error") for step in steps_of(measured)]
    assert all(error > 0 for error in errors) and max(errors) < 1
    interpolated = weights_of(lab.train(*AGED, method("loglinear")))
    distance = max(float((x - interpolated[n]).abs().max()) for n, x in weights_of(plain).items())
    assert distance > 1e-4


def test_a_replay_knows_the_age_of_every_token(lab):
    words = ("mode=hybrid", "max_staleness=2", "updates_per_batch=2", "recover.freq_steps=2")
    run = lab.train(*words, method("loglinear"), "total_train_steps=4", "seed=3")
    found = CliRunner().invoke(app, ["replay", str(run.records), "--step", "4"])
    assert found.exit_code == 0, found.output
    assert "numbers are equal to the record" in found.output
