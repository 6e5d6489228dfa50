"""docs/python.md: its programs are run as scripts, as they stand."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pentad.data.toy import write_byte_model
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model
from pentad.telemetry.steps import read_lines

PAGE = (Path(__file__).parents[3] / "docs" / "python.md").read_text()
TRAINS, SAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(code, folder):
    (folder / "page.py").write_text(code)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "USER": "me", "LOGNAME": "me"}
    command = [sys.executable, "page.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
def test_ten_lines_train_a_model_on_a_list_and_a_function(tmp_path):
    last = run(TRAINS, tmp_path)[-1]
    folder = tmp_path / "runs/logs/me/digits/trial-0"
    rewards = [step["rl"]["reward_mean"] for step in read_lines(folder / "steps.jsonl")]
    assert ast.literal_eval(last[last.index("[") :]) == rewards
    assert len(rewards) == 6 and rewards[-1] > rewards[0] + 0.02
    assert (tmp_path / "runs/given/digits/trial-0/score.py").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("started_warm")
def test_a_model_is_sampled_and_judged(tmp_path):
    tiny = tmp_path / "tiny"
    write_byte_model(tiny)
    model = create_model(dims_of(tiny), device="cpu", dtype=torch.float32, seed=1)
    save_model(model, tmp_path / "models/m", source_folder=tiny, tokenizer_folder=tiny)
    *_, accuracy = run(SAMPLES, tmp_path)
    assert float(accuracy) == 0.0
