"""`pentad replay`: recorded steps trained again without a sampler."""

import json
import re
import shutil
from contextlib import closing

import pytest
from run_lab import steps_of
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.core.lock import FolderLock

SAVED = ("total_train_steps=4", "recover.freq_steps=2", "seed=3")


def replayed(run, step, *words):
    found = CliRunner().invoke(app, ["replay", str(run), "--step", str(step), *words])
    return found.exit_code, found.output


def assert_equal(run, step, first, num_numbers):
    """Steps `first` to `step` were trained again, and every number is that of the record."""
    code, text = replayed(run, step)
    assert code == 0, text
    assert text.count(" equal\n") == num_numbers, text
    assert f"all {num_numbers} numbers are equal to the record" in text
    steps = [int(line.split()[0]) for line in re.findall(r"^ +\d+ .*", text, re.MULTILINE)]
    assert sorted(set(steps)) == list(range(first, step + 1))


@pytest.mark.parametrize(
    ("words", "per_step"),
    [
        (("algorithm.name=grpo",), 3),
        (("algorithm.name=ppo", "updates_per_batch=2", "critic.gradient_checkpointing=false"), 5),
        (("algorithm.name=dapo", "num_iters_per_train_update=3"), 3),
        (("algorithm.kl_coef=0.1", "ref_update_interval=1", "max_staleness=1", "mode=hybrid"), 3),
        (("algorithm.kl_coef=0.1", "max_staleness=1", "mode=async"), 3),
    ],
    ids=["grpo", "ppo", "dapo", "off-policy", "scorer apart"],
)
def test_a_step_trained_again_gives_the_numbers_of_its_record(lab, words, per_step):
    run = lab.train(*words, *SAVED).records
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert_equal(run, 1, 1, per_step)
    assert_equal(run, 2, 1, 2 * per_step)
    assert_equal(run, 4, 3, 2 * per_step)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_record_that_does_not_fit_is_told(lab):
    run = lab.train(*SAVED).records
    file = run / "steps.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[2]["grad_norm"] *= 1.001
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, text = replayed(run, 3)
    assert code == 1
    assert re.search(r"3  grad_norm .* differs by 0\.\d+, beyond 0", text), text
    assert "1 of 3 numbers differ from the record" in text


def test_the_log_probs_of_a_step_can_be_had(lab, tmp_path):
    summary = lab.train("total_train_steps=1")
    code, text = replayed(summary.records, 1, "--dump", str(tmp_path / "dump.jsonl"))
    assert code == 0, text
    lines = [json.loads(line) for line in (tmp_path / "dump.jsonl").read_text().splitlines()]
    gaps = [
        abs(said - drawn)
        for line in lines
        for said, drawn, m in zip(
            line["logprobs"], line["rollout_logprobs"], line["mask"], strict=True
        )
        if m
    ]
    assert len(lines) == 16
    assert max(gaps) == pytest.approx(steps_of(summary)[0]["rl"]["logprob_diff_max"], abs=1e-9)


def test_what_a_replay_lacks_is_one_sentence(lab, tmp_path):
    summary = lab.train(*SAVED, "telemetry.keep_batches=2", trial="short")
    run, checkpoints = summary.records, summary.model.parents[1]
    assert [path.name for path in sorted((run / "batches").iterdir())] == [
        f"step{step}.{kind}" for step in (3, 4) for kind in ("groups", "trained")
    ]
    assert "has batches of steps 3 to 4" in replayed(run, 2)[1]
    assert "the run has recorded steps 1 to 4" in replayed(run, 9)[1]
    assert "is not the folder of a run" in replayed(tmp_path, 1)[1]
    with closing(FolderLock(run, "run")):
        code, text = replayed(run, 4)
    assert code == 2 and "another program runs in it (process" in text
    file = run / "batches" / "step3.groups"
    file.write_bytes(file.read_bytes()[:-9])
    code, text = replayed(run, 4)
    assert code == 2 and "is not the batch of step 3 as it was written" in " ".join(text.split())
    shutil.rmtree(checkpoints / "recover_info")
    code, text = replayed(run, 4)
    assert code == 2 and "no recovery checkpoint before it is left" in text


def test_a_config_that_changed_on_the_way_is_named(lab):
    lab.train("total_train_steps=2", "recover.freq_steps=100", trial="forced")
    more = ("total_train_steps=4", "actor.optimizer.lr=5e-3", "recover.allow=[actor.optimizer.lr]")
    summary = lab.train(*more, "recover.freq_steps=100", trial="forced")
    assert_equal(summary.records, 4, 3, 6)  # the last commit of the first start has the change
    info = summary.model.parents[1] / "recover_info"
    shutil.rmtree(info)
    code, text = replayed(summary.records, 4)
    assert code == 2
    assert "the config changed between step 1 and step 4, in actor.optimizer.lr" in text


def test_steps_that_are_done_again_leave_no_batch_behind(lab):
    summary = lab.train(*SAVED, trial="again")
    info = summary.model.parents[1] / "recover_info"
    shutil.rmtree(info / "globalstep3")
    for model in summary.model.parent.glob("epoch*"):
        shutil.rmtree(model)
    again = lab.train(*SAVED, "telemetry.keep_batches=0", trial="again")
    kept = [path.name for path in sorted((again.records / "batches").glob("*.groups"))]
    figures = {path.stem for path in (again.records / "batches").glob("*.trained")}
    assert figures == {name.removesuffix(".groups") for name in kept}
    assert kept == ["step1.groups", "step2.groups"]


@pytest.mark.dist
def test_a_step_is_replayed_on_another_layout(lab):
    run = lab.train(*SAVED).records
    code, text = replayed(run, 4, "--layout", "archon:d2")
    assert code == 0, text
    assert "layout was pp=1, dp_shard=1" in text
