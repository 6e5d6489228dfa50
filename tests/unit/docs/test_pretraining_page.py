"""docs/pretraining.md and the pretraining examples: run as they stand, and true."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "pretraining.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in {"CUDA_VISIBLE_DEVICES": "", "USER": "me", "LOGNAME": "me"}.items():
        monkeypatch.setenv(name, value)


def output_of(words: list[str]) -> str:
    """What a command says that ends well: in this process, where torch is imported already."""
    assert words[0] == "pentad"
    done = CliRunner().invoke(app, words[1:])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_example_runs_and_reads_what_the_page_says(tmp_path):
    [python], [bash] = blocks("python"), blocks("bash")
    exec(compile(python, "pretraining.md", "exec"), {"__name__": "page"})
    said = output_of(bash.split())
    assert "pretrain first-pretrain/trial-0: 10 steps" in said
    run = tmp_path / "runs/logs/me/first-pretrain/trial-0"
    steps = read_lines(run / "steps.jsonl")
    assert len(steps) == 10 and steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert re.search(r"`(docs.jsonl: .*?)`", PAGE)[1] in (run / "log.txt").read_text()


def test_the_commands_of_the_smoke_recipe_read_the_pages_and_learn(tmp_path):
    """Its header as it stands; in the blocks of moe-engine's configs."""
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    header = (ROOT / "examples/pretrain_smoke.yaml").read_text()
    make, smoke = (shlex.split(line[4:]) for line in re.findall("^#   .*", header, re.MULTILINE))
    assert make[:2] == ["python", "-c"]
    exec(compile(make[2], "pretrain_smoke.yaml", "exec"), {"__name__": "page"})
    output_of(smoke)
    run = tmp_path / "runs/logs/me/pretrain-smoke/trial-0"
    losses = [step["loss"] for step in read_lines(run / "steps.jsonl")]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.5
    said = (run / "log.txt").read_text()
    assert "training.lr = 0.003: read as actor.optimizer.lr" in said
    assert "total_train_steps = 5 in place of 200: --smoke" in said


def test_the_cluster_recipe_is_planned_over_256_devices(capsys):
    from pentad.cli.plan import run_plan

    config, notes = prepare(ROOT / "examples/pretrain_moe.yaml", (), "plan", 80.0)
    assert config.allocation_mode == "archon:(attn:d8p4t8|ffn:d4p4t8e2)"
    assert run_plan(config, notes, 80.0) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1024 sequences per step, each at most 4096 tokens: 4,194,304 tokens" in said
    assert "100000 steps (sequences are not counted)" in said
    assert "planned for pretrain" in said and "Fits: " in said
