"""The examples: the GSM8K script runs as its users run it, every recipe can be planned."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from pentad.data.toy import write_byte_model
from pentad.planner.prepare import prepare
from pentad.rewards.verifiers import gsm8k
from pentad.telemetry.steps import read_lines

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
DATA = EXAMPLES / "math" / "data"
OF_OTHERS = EXAMPLES / "least_code"  # files of other systems
RECIPES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in EXAMPLES.rglob("*.yaml")
    if OF_OTHERS not in path.parents
)
TINY = "examples/math/gsm8k_tiny.yaml"


def run_script(*args):
    command = [sys.executable, "examples/math/gsm8k_rl.py", *args]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=540)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_planned(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    write_byte_model(tmp_path / "gsm8k-tiny-model")
    write_byte_model(tmp_path / "mixture", num_experts=4)
    is_local = recipe in (TINY, "examples/pretrain_smoke.yaml")
    overrides = [f"fileroot={tmp_path}"] if is_local else []
    config, _ = prepare(recipe, overrides, "plan")
    assert config.actor.path and config.allocation_mode


@pytest.mark.usefixtures("started_warm")
def test_the_script_trains_on_gsm8k_with_a_model_it_makes(tmp_path):
    out = run_script("--config", TINY, f"fileroot={tmp_path}", "total_train_steps=2")
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith(f"made {tmp_path / 'gsm8k-tiny-model'}: ")
    said = dict(line.split(": ", 1) for line in out.stdout.splitlines()[-2:])
    records, model = Path(said["records"]), said["model"]

    steps = read_lines(records / "steps.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert steps[-1]["funnel"]["trained"] == 2 * 8
    evals = read_lines(records / "evals.jsonl")
    assert [(e["version"], e["num_prompts"], e["num_failed"]) for e in evals] == [
        (0, 32, 0),
        (2, 32, 0),
    ]
    asked = {chat(row["question"]): row["answer"] for row in rows_of("train.jsonl")}
    samples = read_lines(records / "samples.jsonl")
    assert len(samples) == 2 * 4
    for sample in samples:
        verdict = gsm8k(sample["text"], asked[sample["prompt"]])
        assert (sample["reward"], sample["reward_parts"]) == (verdict.value, verdict.parts)
    assert AutoModelForCausalLM.from_pretrained(model).config.vocab_size == 259


@pytest.mark.usefixtures("started_warm")
def test_the_script_fills_in_data_and_reward_and_says_so(tmp_path):
    sizes = ["train_dataset.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=4"]
    model = [f"actor.path={tmp_path / 'gsm8k-tiny-model'}", "actor.init_from_scratch=true"]
    out = run_script(f"fileroot={tmp_path}", "total_train_steps=1", *model, *sizes)
    assert out.returncode == 0, out.stderr
    said = next(line for line in out.stdout.splitlines() if "filled in" in line)
    assert f"train_dataset.path={DATA / 'train.jsonl'} train_dataset.prompt_key=question" in said
    assert f"valid_dataset.path={DATA / 'test.jsonl'}" in said and said.endswith("reward.fn=gsm8k")
    records = Path(out.stdout.splitlines()[-2].removeprefix("records: "))
    assert read_lines(records / "evals.jsonl")[0]["num_prompts"] == 32


def test_the_script_refuses_a_recipe_for_what_it_cannot_fill_in(tmp_path):
    out = run_script("--config", "examples/archon_qwen3_8b.yaml", f"fileroot={tmp_path}")
    assert out.returncode == 2
    assert "actor.path = Qwen/Qwen3-8B: is incomplete in the cache" in out.stderr
    assert "train_dataset" not in out.stderr and "reward" not in out.stderr


def chat(question):
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def rows_of(name):
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


@pytest.mark.parametrize(("name", "count"), [("train.jsonl", 64), ("test.jsonl", 32)])
def test_the_data_are_rows_of_gsm8k_whose_own_solutions_are_right(name, count):
    rows = rows_of(name)
    assert len({row["question"] for row in rows}) == count
    for row in rows:
        assert row.keys() == {"question", "answer"}
        assert gsm8k(row["answer"], row["answer"]).value == 1.0
