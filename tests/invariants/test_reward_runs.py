"""Rewards as people write them, through runs and commands."""

import json

import pytest
from typer.testing import CliRunner

from pentad.cli import main as cli
from pentad.core.errors import UserError
from pentad.telemetry.steps import read_lines

REWARDS = """\
def close(completions, answer, prompt_len=0, **columns):
    assert len(columns["digits"]) == len(completions) == len(answer)
    pairs = zip(completions, answer, strict=True)
    return [sum(a == b for a, b in zip(c, right)) / 5 for c, right in pairs]

def length(completion, digits, weight=0.5):
    return {"enough": weight * (len(completion) >= len(digits))}

def typo(completion, digts):
    return 1.0

def broken(completion):
    return completion.count(answr)
"""


@pytest.fixture
def files(task, tmp_path):
    """A dataset with a column of its own, and rewards."""
    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    lines = [json.dumps({**row, "digits": row["prompt"][:-1]}) for row in rows]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def test_batched_functions_columns_and_weights_train(lab, files):
    summary = lab.train(
        f"train_dataset.path={files}/data.jsonl",
        f"valid_dataset.path={files}/data.jsonl",
        "valid_dataset.limit=4",
        f"reward.fn=[exact_match, '{files}/mine.py:close', '{files}/mine.py:length']",
        "reward.weights=[1, 2, 0.5]",
    )
    assert summary.num_steps == 3
    for line in read_lines(summary.records / "samples.jsonl"):
        parts = line["reward_parts"]
        assert set(parts) == {"exact_match", "correct", "close", "length", "length/enough"}
        wanted = parts["exact_match"] + 2 * parts["close"] + 0.5 * parts["length"]
        assert line["reward"] == pytest.approx(wanted)
    assert summary.evals[-1]["accuracy"] is not None, "the part `correct` of exact_match"


def test_a_column_that_is_not_there_is_named_before_the_run(lab, files):
    with pytest.raises(UserError) as caught:
        lab.train(f"train_dataset.path={files}/data.jsonl", f"reward.fn={files}/mine.py:typo")
    said = (
        "it requires 'digts', and rows have no such column; the columns are answer, digits, prompt"
    )
    assert said in str(caught.value)
    assert not (lab.fileroot / "logs").exists()


def tried(lab, files, fn, *options):
    given = [
        f"actor.path={lab.task}/model",
        f"train_dataset.path={files}/data.jsonl",
        f"reward.fn={files}/mine.py:{fn}",
    ]
    return CliRunner().invoke(cli.app, ["reward", *given, *options])


def test_a_reward_can_be_tried_on_a_row(lab, files):
    done = tried(lab, files, "close", "--row", "2")
    assert done.exit_code == 0, done.stderr
    row = json.loads((files / "data.jsonl").read_text().splitlines()[2])
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        f"row 2 ({files}/data.jsonl:3)",
        *(f"  {name}: {value!r}" for name, value in row.items()),
    ]
    assert lines[4] == f"the row's own answer: {row['answer']!r}"
    assert lines[5].startswith("  reward 1, ") and lines[5].endswith(" ms")
    assert lines[6] == "an empty completion: ''" and lines[7].startswith("  reward 0, ")
    done = tried(lab, files, "length", "--completion", "123456")
    assert "the completion: '123456'\n  reward 0.5 (enough 0.5), " in done.stdout


def test_a_reward_that_fails_when_tried_says_where(lab, files):
    done = tried(lab, files, "broken")
    assert done.exit_code == 1
    where = f"({files}/mine.py, line 13)"
    assert f"  failed: NameError: name 'answr' is not defined {where}, " in done.stdout
    assert "the reward failed on 2 of 2 completions" in done.stderr
    done = tried(lab, files, "close", "--row", "64")
    assert done.exit_code == 2 and "--row = 64: there are 64 rows, counted from 0" in done.stderr
    done = tried(lab, files, "close", "reward.fn=null")
    assert "reward.fn: is not set, so there is nothing to try" in done.stderr
