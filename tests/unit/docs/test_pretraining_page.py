"""docs/pretraining.md and the pretraining examples: run as they stand, and true."""

import os
import re
import subprocess
import sys
from pathlib import Path

from pentad.data.toy import write_byte_model
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines
from pentad.trainer.sft import run_pretrain

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "pretraining.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_runs_and_reads_what_the_page_says(tmp_path):
    [python], [bash] = blocks("python"), blocks("bash")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "USER": "me", "LOGNAME": "me"}
    command = [sys.executable, "-m", "pentad.cli.main", *bash.split()[1:]]
    for words in ([sys.executable, "-c", python], command):
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "pretrain first-pretrain/trial-0: 10 steps" in done.stdout
    run = tmp_path / "runs/logs/me/first-pretrain/trial-0"
    steps = read_lines(run / "steps.jsonl")
    assert len(steps) == 10 and steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert re.search(r"`(docs.jsonl: .*?)`", PAGE)[1] in (run / "log.txt").read_text()


def test_the_smoke_recipe_reads_the_pages_and_learns(tmp_path, monkeypatch):
    """In the blocks of moe-engine's configs."""
    monkeypatch.chdir(ROOT)
    write_byte_model(tmp_path / "mixture", num_experts=4)
    words = [f"fileroot={tmp_path}", "user=me", "training.total_steps=5"]
    config, notes = prepare(ROOT / "examples/pretrain_smoke.yaml", words, "pretrain")
    assert "training.lr = 0.003: read as actor.optimizer.lr" in notes
    assert (config.allocation_mode, config.train_dataset.max_length) == ("archon:d1p1t1", 128)
    losses = [
        step["loss"]
        for step in read_lines(run_pretrain(config, notes, device="cpu").records / "steps.jsonl")
    ]
    assert len(losses) == 5 and losses[-1] < losses[0] - 0.5


def test_the_cluster_recipe_is_planned_over_256_devices(capsys):
    from pentad.cli.plan import run_plan

    config, notes = prepare(ROOT / "examples/pretrain_moe.yaml", (), "plan", 80.0)
    assert config.allocation_mode == "archon:(attn:d8p4t8|ffn:d4p4t8e2)"
    assert run_plan(config, notes, 80.0) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1024 sequences a step, each at most 4096 tokens: 4,194,304 tokens" in said
    assert "100000 steps (sequences are not counted)" in said
    assert "planned for pretrain" in said and "Fits: " in said
