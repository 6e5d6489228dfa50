"""Runs of one side alone: groups sampled without a learner, and trained without a sampler."""

import json
from pathlib import Path

import pytest
from run_lab import steps_of, values_of
from test_rl_runs import assert_same_weights
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.core.errors import RunError, UserError
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines
from pentad.trainer.context import RunSummary
from pentad.trainer.rank.service import LearnerService
from pentad.trainer.saving.batches import read_batch
from pentad.trainer.sources.kept_groups import KeptSource, run_train_only
from pentad.trainer.sources.rollout_only import run_rollout_only

UNCORRECTED = ["algorithm.correction=none", "algorithm.allow_uncorrected=true"]


class Sides:
    """One side of the lab's recipe."""

    def __init__(self, lab):
        self.lab = lab

    def run(self, side, *overrides, trial):
        words = self.words(f"only={side}", f"trial_name={trial}", *overrides)
        config, notes = prepare(None, words, "train")
        run = run_rollout_only if side == "rollout" else run_train_only
        return run(config, notes, device="cpu")

    def words(self, *overrides):
        return self.lab.words_for("one", *overrides)


@pytest.fixture
def sides(lab):
    return Sides(lab)


def samples_of(folder, step):
    return [
        (group.gid, sample.ids.tolist(), sample.rollout_logprobs.tolist(), sample.reward)
        for group in read_batch(folder, step).groups
        for sample in group.samples
    ]


@pytest.mark.parametrize("critic", [[], ["algorithm.name=ppo"]])
def test_training_what_a_run_kept_gives_its_weights(lab, sides, critic):
    """Bit by bit, without a sampler, and also where it stops in between."""
    whole = lab.train(*critic)
    given = [*critic, *UNCORRECTED, f"groups_from={whole.records}", "recover.freq_steps=1"]
    sides.run("train", *given, "total_train_steps=2", trial="again")
    again = sides.run("train", *given, trial="again")
    assert_same_weights(again, whole)
    for one, other in zip(values_of(again), values_of(whole), strict=True):
        one, other = json.loads(one), json.loads(other)
        assert one["loss"] == other["loss"] and one["grad_norm"] == other["grad_norm"]
        kept = ["funnel", "version", "num_tokens", "num_groups"]
        assert [one[key] for key in kept] == [other[key] for key in kept]
        assert one["rl"].pop("staleness") is None and other["rl"].pop("staleness")
        assert one["rl"] == other["rl"]


def test_a_run_that_only_samples_draws_what_the_first_step_drew(lab, sides):
    whole = lab.train()
    sampled = sides.run("rollout", trial="sampled")
    assert sampled.num_steps == 3 and not (sampled.records.parent / "checkpoints").exists()
    assert samples_of(sampled.model, 1) == samples_of(whole.records / "batches", 1)
    gids = [[gid for gid, *_ in samples_of(sampled.model, step)] for step in (2, 3)]
    assert gids == [
        [gid for gid, *_ in samples_of(whole.records / "batches", step)] for step in (2, 3)
    ]
    first, *rest = read_lines(sampled.records / "steps.jsonl")
    trained = steps_of(whole)[0]
    for key in ("reward_mean", "length_mean", "prompt_length_mean", "truncated_share"):
        assert first["rl"][key] == trained["rl"][key]
    assert first["funnel"] == trained["funnel"] and first["loss"] is None
    assert {step["version"] for step in (first, *rest)} == {0}


def test_sampling_goes_on_where_it_stopped(lab, sides):
    drops = ["algorithm.dynamic_filter=true", "gconfig.n_samples=2", "gconfig.max_new_tokens=3"]
    whole = sides.run("rollout", *drops, trial="whole")
    sides.run("rollout", *drops, "total_train_steps=1", trial="parts")
    (whole.model / ".step2.groups.aside").write_bytes(b"")
    parts = sides.run("rollout", *drops, trial="parts")
    assert parts.num_steps == whole.num_steps == 3
    for step in (1, 2, 3):
        assert samples_of(parts.model, step) == samples_of(whole.model, step)
    records = [read_lines(one.records / "steps.jsonl") for one in (parts, whole)]
    assert records[0][-1]["funnel"] == records[1][-1]["funnel"]
    assert records[0][-1]["funnel"]["dropped"]["no_signal"] > 0


def test_sampled_groups_are_trained_with_a_correction(lab, sides):
    sampled = sides.run("rollout", trial="sampled")
    given = f"groups_from={sampled.records}"
    config, notes = prepare(None, sides.words("only=train", given), "train")
    assert config.algorithm.correction == "tis"
    assert any("only = train" in note for note in notes)
    summary = sides.run("train", given, "total_train_epochs=2", "total_train_steps=5", trial="two")
    assert isinstance(summary, RunSummary) and summary.num_steps == 5
    steps = steps_of(summary)
    assert [step["epoch"] for step in steps] == [0, 0, 0, 1, 1]
    assert steps[0]["rl"]["logprob_diff_max"] < 1e-4 < steps[4]["rl"]["logprob_diff_max"]
    assert steps[3]["rl"]["reward_mean"] == steps[0]["rl"]["reward_mean"]
    # Started again with other groups in their place it is refused.
    (sampled.model / "step2.groups").unlink()
    with pytest.raises(UserError, match="has other groups than when the run began"):
        more = ["total_train_epochs=3", "total_train_steps=6"]
        sides.run("train", given, *more, trial="two")


def test_the_command_line_says_where_the_groups_are(lab, sides):
    words = sides.words("trial_name=said", "total_train_steps=1")
    result = CliRunner().invoke(app, ["train", "--only", "rollout", *words])
    assert result.exit_code == 0, result.output
    records = lab.fileroot / "logs"
    assert "1 steps sampled" in result.output and f"--groups-from {records}" in result.output
    assert "trial_name=said-trained)" in result.output.replace("\n", "")
    result = CliRunner().invoke(app, ["train", "--only", "train", *words])
    assert result.exit_code == 2
    assert "groups_from: only = train trains the groups of another run" in result.stderr


def test_a_run_does_not_train_the_groups_of_its_own_folder(lab, sides):
    sampled = sides.run("rollout", "total_train_steps=1", trial="sampled")
    for given in (sampled.records, sampled.records / ".." / "sampled"):
        with pytest.raises(UserError, match="is this run's own folder"):
            sides.run("train", f"groups_from={given}", trial="sampled")
    assert (sampled.model / "step1.groups").is_file()


def test_steps_behind_a_gap_are_not_removed(lab, sides):
    sampled = sides.run("rollout", trial="sampled")
    missing = sampled.model / "step1.groups"
    kept = missing.read_bytes()
    missing.unlink()
    with pytest.raises(UserError, match="has steps 2 to 3, and step 1 is missing"):
        sides.run("rollout", "total_train_steps=4", trial="sampled")
    assert (sampled.model / "step3.groups").is_file()
    missing.write_bytes(kept)
    assert sides.run("rollout", "total_train_steps=4", trial="sampled").num_steps == 4


@pytest.mark.parametrize(
    ("reader", "method"), [(KeptSource, "train"), (LearnerService, "train_kept")]
)
def test_groups_replaced_while_a_run_trains_are_refused(lab, sides, reader, method, monkeypatch):
    """What it trains is what it has recorded, not whatever the folder holds by then."""
    sampled = sides.run("rollout", "total_train_steps=2", trial="sampled")
    other = sides.run("rollout", "total_train_steps=2", "seed=7", trial="other")
    plain = getattr(reader, method)

    def replaced(self, *args, **kwargs):
        if args[:1] == (1,) or kwargs.get("number") == 1:
            data = (other.model / "step2.groups").read_bytes()
            (sampled.model / "step2.groups").write_bytes(data)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(reader, method, replaced)
    with pytest.raises((UserError, RunError), match="has other groups than when the run began"):
        given = [f"groups_from={sampled.records}", "total_train_steps=2"]
        sides.run("train", *given, trial="trained")


def test_kept_groups_are_trained_over_ranks_without_a_sampler(lab, sides):
    sampled = sides.run("rollout", "total_train_steps=1", trial="sampled")
    given = [f"groups_from={sampled.records}", "total_train_steps=1"]
    missing = ["train_dataset.path=null", "reward.fn=null"]
    (one,) = steps_of(sides.run("train", *given, trial="one"))
    (two,) = steps_of(
        sides.run("train", *given, *missing, "allocation_mode=archon:d2", trial="two")
    )
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_ranks_are_given_absolute_folders(lab, sides, tmp_path, monkeypatch):
    """They may work in another folder than the lead."""
    monkeypatch.chdir(tmp_path)
    given = {}

    def watched(method):
        plain = getattr(LearnerService, method)

        def call(self, *args, **kwargs):
            given[method] = Path(kwargs.get("root") or kwargs["folder"])
            return plain(self, *args, **kwargs)

        return call

    for method in ("train_kept", "save_state", "restore_state", "export"):
        monkeypatch.setattr(LearnerService, method, watched(method))
    sampled = sides.run("rollout", "fileroot=runs", "total_train_steps=2", trial="sampled")
    words = ["fileroot=runs", f"groups_from={sampled.records}", "recover.freq_steps=1"]
    for num_steps in (1, 2):
        sides.run("train", *words, f"total_train_steps={num_steps}", trial="trained")
    assert len(given) == 4 and all(path.is_absolute() for path in given.values())
    assert not sampled.records.is_absolute()


def test_damaged_groups_are_refused_before_anything_starts(lab, sides):
    sampled = sides.run("rollout", "total_train_steps=1", trial="sampled")
    (sampled.model / "step1.groups").write_text("{}")
    with pytest.raises(UserError, match="is not the batch of step 1 as it was written"):
        sides.run("train", f"groups_from={sampled.records}", trial="refused")
