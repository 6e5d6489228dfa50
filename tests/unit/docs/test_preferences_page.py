"""docs/preferences.md: its example is run as it stands, and what it says of it is true."""

import os
import re
from contextlib import chdir
from pathlib import Path

import pytest
from process_state import process_restored
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.telemetry.steps import read_lines

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "preferences.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The page followed in an empty folder: the folder, and what the run printed."""
    folder = tmp_path_factory.mktemp("page")
    [python], [bash, _] = blocks("python"), blocks("bash")
    with process_restored(), chdir(folder):
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "USER": "me", "LOGNAME": "me"}
        exec(compile(python, "preferences.md", "exec"), {"__name__": "page"})
        done = CliRunner().invoke(app, bash.split()[1:])
    assert done.exit_code == 0, done.output
    return folder, done.stdout


def test_the_example_runs_and_prints_what_the_page_shows(followed):
    _, printed = followed
    lines = {" ".join(re.sub(r"[-\d.:]+", "0", line).split()) for line in printed.splitlines()}
    for line in blocks("text")[0].splitlines():
        if line != "...":
            assert " ".join(re.sub(r"[-\d.:]+", "0", line).split()) in lines, line


def test_the_example_learns(followed):
    folder, _ = followed
    steps = read_lines(folder / "runs/logs/me/first-dpo/trial-0/steps.jsonl")
    assert len(steps) == 16 and steps[-1]["preference"]["accuracy"] > 0.9


def test_a_reward_model_is_trained_and_scores_a_run(followed):
    folder, _ = followed
    reward, [yaml] = re.search(r"```bash\n(pentad reward-model .*?)\n```", PAGE)[1], blocks("yaml")
    (folder / "rl.yaml").write_text(yaml)
    words = "actor.path=models/tiny actor.init_from_scratch=true train_dataset.path=pairs.jsonl"
    words += " train_dataset.batch_size=2 gconfig.n_samples=2 gconfig.max_new_tokens=4"
    with process_restored(), chdir(folder):
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "USER": "me", "LOGNAME": "me"}
        for line in (reward, f"pentad train rl.yaml {words} total_train_steps=1"):
            done = CliRunner().invoke(app, line.split()[1:])
            assert done.exit_code == 0, done.output
