"""Whole runs of ReMax: greedy answers reach the learner by every path, and are never trained."""

import pytest
from run_lab import Lab, steps_of, values_of
from test_one_sided_runs import Sides
from test_rl_runs import assert_same_weights
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.core.errors import Stopped, UserError
from pentad.data.toy import write_model, write_task
from pentad.telemetry.steps import read_lines
from pentad.trainer.pumps.train_pump import BatchTrainer
from pentad.trainer.saving.batches import read_batch

REMAX = ("algorithm.name=remax", "telemetry.keep_batches=100", "gconfig.n_samples=2")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Eight prompts: a batch of eight is an epoch."""
    folder = tmp_path_factory.mktemp("small")
    write_model(folder / "model")
    write_task(folder, seed=5, num_train=8, num_sft=8, num_valid=8)
    return folder


@pytest.fixture
def lab(small, tmp_path):
    return Lab(small, tmp_path)


def groups_of(summary, step):
    return read_batch(summary.records / "batches", step).groups


@pytest.mark.parametrize("num_samples", [1, 3])
def test_the_baseline_is_the_reward_of_greedy_answers_by_the_same_weights(lab, small, num_samples):
    """An evaluation at temperature 0 on the training prompts gives the same mean, at every step."""
    run = lab.train(
        *REMAX,
        f"gconfig.n_samples={num_samples}",
        "train_dataset.batch_size=8",
        f"valid_dataset.path={small / 'train.jsonl'}",
        "evaluator.freq_steps=1",
        "evaluator.temperature=0",
        "actor.optimizer.lr=1e-2",
    )
    evals = [line["reward_mean"] for line in read_lines(run.records / "evals.jsonl")]
    greedy = [step["rl"]["reward_greedy"] for step in steps_of(run)]
    assert greedy == pytest.approx(evals[:3], abs=1e-12) and len(set(greedy)) > 1
    for number, step in enumerate(steps_of(run), 1):
        groups = groups_of(run, number)
        assert step["num_samples"] == 8 * num_samples
        assert {len(group.samples) for group in groups} == {num_samples}
        rewards = [sample.reward for group in groups for sample in group.samples]
        assert step["rl"]["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
        mine = [s.reward - group.greedy.reward for group in groups for s in group.samples]
        tokens = [sample.num_sampled for group in groups for sample in group.samples]
        mean = sum(a * n for a, n in zip(mine, tokens, strict=True)) / sum(tokens)
        assert step["rl"]["advantage_mean"] == pytest.approx(mean, abs=1e-6)
        assert step["grad_norm"] > 0


def test_one_sample_per_prompt_raises_no_alarm_of_groups_without_variance(lab, tmp_path):
    (tmp_path / "rewards.py").write_text("def odd(ids):\n    return float(ids[0] % 2)\n")
    words = ("gconfig.n_samples=1", "total_train_steps=6", "train_dataset.batch_size=8")
    alone = lab.train(*REMAX, *words, f"reward.fn={tmp_path / 'rewards.py'}:odd")
    assert min(step["rl"]["reward_std"] for step in steps_of(alone)) > 0
    assert {s["rl"]["groups_without_variance"] for s in steps_of(alone)} == {1.0}
    assert "got the same reward" not in (alone.records / "log.txt").read_text()


def test_every_placement_gives_the_same_numbers(lab):
    one = lab.train(*REMAX)
    for words in (["mode=hybrid"], ["mode=async", "scheduler.processes=separate"]):
        other = lab.train(*REMAX, *words)
        assert_same_weights(one, other)
        assert [s["rl"]["reward_greedy"] for s in steps_of(other)] == [
            s["rl"]["reward_greedy"] for s in steps_of(one)
        ]
        assert steps_of(other)[-1]["funnel"] == steps_of(one)[-1]["funnel"]


def test_stale_groups_and_several_updates_have_their_baseline(lab):
    words = ("mode=hybrid", "max_staleness=2", "updates_per_batch=2", "total_train_steps=5")
    run = lab.train(*REMAX, *words, "actor.optimizer.lr=1e-2")
    assert all(step["rl"]["reward_greedy"] is not None for step in steps_of(run))
    assert all(step["rl"]["correction_weight_mean"] is not None for step in steps_of(run))


def stopped_after(num, monkeypatch, lab, *words):
    plain = BatchTrainer.train

    async def train(self, batch, timer):
        trained = await plain(self, batch, timer)
        if batch + 1 == num:
            self.state.request_stop("SIGTERM")
        return trained

    with monkeypatch.context() as patch:
        patch.setattr(BatchTrainer, "train", train)
        with pytest.raises(Stopped):
            lab.train(*words, trial="stopped")


OVER = (*REMAX, "rollout.oversample=1.5", "gconfig.max_new_tokens=16", "total_train_steps=6")


def test_oversampled_groups_are_trained_once_each_with_a_greedy_answer(lab, monkeypatch):
    run = lab.train(*OVER)
    groups = [group for step in range(1, 7) for group in groups_of(run, step)]
    assert sorted(group.gid for group in groups) == list(range(24))
    assert all(group.greedy is not None and len(group.samples) == 2 for group in groups)
    assert sum(step["oversampled"]["carried"] for step in steps_of(run)) > 3
    assert sum(step["oversampled"]["tokens_carried"] for step in steps_of(run)) > 20
    lags = [pair for step in steps_of(run) for pair in step["rl"]["staleness"].items()]
    assert sum(num for lag, num in lags if lag != "0") > 20
    assert values_of(lab.train(*OVER)) == values_of(run)
    stopped_after(3, monkeypatch, lab, *OVER)
    assert values_of(lab.train(*OVER, trial="stopped")) == values_of(run)


def test_a_resumed_run_keeps_the_greedy_answers_of_ready_groups(lab, monkeypatch):
    """Groups that were ready when the run stopped are trained with the baseline they had. After a
    run without greedy answers, they are sampled again."""
    ahead = ("mode=hybrid", "max_staleness=2", "total_train_steps=5", "recover.freq_steps=1")
    stopped_after(2, monkeypatch, lab, *REMAX, *ahead)
    run = lab.train(*REMAX, *ahead, trial="stopped")
    assert steps_of(run)[-1]["funnel"]["trained"] == 20
    plain = [word for word in REMAX if "name" not in word]
    lab.count += 1
    stopped_after(2, monkeypatch, Other(lab), *plain, *ahead)
    words = (*REMAX, *ahead, "recover.allow=[algorithm]")
    run = Other(lab).train(*words, trial="stopped")
    greedy = [step["rl"]["reward_greedy"] for step in steps_of(run)]
    assert greedy[:2] == [None, None] and None not in greedy[2:]
    gids = [group.gid for step in range(1, 6) for group in groups_of(run, step)]
    assert sorted(gids) == list(range(20))


class Other:
    """The same lab with other trials."""

    def __init__(self, lab):
        self.lab = lab

    def train(self, *words, trial):
        return self.lab.train(*words, trial=f"other-{trial}")


def test_a_replay_gives_the_numbers_of_the_record(lab):
    run = lab.train(*REMAX, "total_train_steps=4", "recover.freq_steps=2")
    found = CliRunner().invoke(app, ["replay", str(run.records), "--step", "4"])
    assert found.exit_code == 0, found.output
    assert "numbers are equal to the record" in found.output


def test_recorded_groups_are_trained_with_their_baseline_and_refused_without(lab):
    sides = Sides(lab)
    whole = lab.train(*REMAX)
    same = ["algorithm.correction=none", "algorithm.allow_uncorrected=true"]
    again = sides.run("train", *REMAX, *same, f"groups_from={whole.records}", trial="again")
    assert_same_weights(again, whole)
    sampled = sides.run("rollout", *REMAX, trial="sampled")
    first = read_lines(sampled.records / "steps.jsonl")[0]
    assert first["rl"]["reward_greedy"] == steps_of(whole)[0]["rl"]["reward_greedy"]
    given = f"groups_from={sampled.records}"
    trained = steps_of(sides.run("train", *REMAX, given, trial="trained"))
    assert trained[0]["rl"]["reward_greedy"] == first["rl"]["reward_greedy"]
    plain = sides.run("rollout", "gconfig.n_samples=2", trial="plain")
    with pytest.raises(UserError, match="groups of step 1 have none; sample them with algorithm"):
        sides.run("train", *REMAX, f"groups_from={plain.records}", trial="refused")


def test_plan_counts_the_greedy_answers(lab):
    words = lab.words_for("planned", *REMAX)
    found = CliRunner().invoke(app, ["plan", *words])
    assert found.exit_code == 0, found.output
    assert "remax also samples 4 greedy answers, not trained" in found.output
