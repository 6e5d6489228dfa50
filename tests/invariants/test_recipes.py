"""Every recipe starts, trains and evaluates; that it learns is measured in docs/recipes.md."""

import importlib.util
import json
import sys
import threading
from pathlib import Path

import pytest
from hub_server import client_of, serving_hub
from run_lab import steps_of

from pentad.data.toy import write_byte_model
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model
from pentad.planner.prepare import prepare
from pentad.rewards.verifiers import sort_digits
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.rollouts import run_train

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
HAS_TASKS = importlib.util.find_spec("reasoning_gym") is not None


@pytest.fixture(scope="module")
def runner():
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("recipes_run", ROOT / "recipes" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    module.IMITATED = dict.fromkeys(module.IMITATED, 2)
    return module


@pytest.fixture(scope="module")
def fileroot(runner, tmp_path_factory):
    """With models and data as `make recipes` makes them, imitated for two steps."""
    root = tmp_path_factory.mktemp("recipes")
    names = {path.stem for path in RECIPES} - (set() if HAS_TASKS else {"reasoning_gym"})
    runner.prepare_toys(str(root), names)
    return root


@pytest.fixture(scope="module")
def judge(runner):
    server = runner.serve(0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"reward.judge.url=http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_and_evaluates(recipe, fileroot, judge, monkeypatch):
    if recipe.stem == "reasoning_gym" and not HAS_TASKS:
        pytest.skip("reasoning-gym is not installed (pip install 'pentad[reasoning-gym]')")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = (f"fileroot={fileroot}", "total_train_steps=2", "valid_dataset.limit=8")
    sizes = ("train_dataset.batch_size=4", "gconfig.n_samples=4")
    asked = [judge] if recipe.stem == "judge" else []
    config, notes = prepare(recipe, [*words, *sizes, *asked], "train")
    summary = run_train(config, notes, device="cpu")
    steps = steps_of(summary)
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["loss"] is not None for record in steps)
    lines = read_lines(summary.records / "evals.jsonl")
    assert [line["version"] for line in lines] == [0, 2]
    assert all(line["accuracy"] is not None and line["num_failed"] == 0 for line in lines)


@pytest.mark.parametrize("answer", ["13456", "1346", "13467379", "", "no", "12345"])
def test_the_judge_scores_as_the_task_does(runner, answer):
    """A judge that gave nothing for long answers taught the policy to give short ones."""
    judge = sys.modules[runner.serve.__module__]
    question = f"The digits 53146> were to be sorted.\nAnswer: {answer}\nHow good is that?"
    said = float(judge.verdict(question).rpartition(" ")[2]) / 10
    assert said == pytest.approx(sort_digits(answer, "13456").value, abs=0.005)  # one decimal


def test_gsm8k_is_trained_by_the_names_of_the_hub(tmp_path, monkeypatch):
    """The recipe as it is; the local hub has a tiny model and rows of GSM8K's form by its names."""
    write_byte_model(tmp_path / "bytes")
    model = create_model(dims_of(tmp_path / "bytes"), seed=3)
    save_model(
        model, tmp_path / "m", source_folder=tmp_path / "bytes", tokenizer_folder=tmp_path / "bytes"
    )
    files = {file.name: file.read_bytes() for file in (tmp_path / "m").iterdir()}
    rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1\n#### {n + 1}"} for n in range(8)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    recipe = ROOT / "recipes" / "hub" / "gsm8k.yaml"
    words = ["total_train_steps=2", "train_dataset.batch_size=2", "gconfig.n_samples=2"]
    words += ["gconfig.max_new_tokens=4", f"fileroot={tmp_path / 'runs'}"]
    monkeypatch.chdir(tmp_path)
    with serving_hub() as hub, client_of(hub, tmp_path / "cache", monkeypatch):
        commit = hub.add("model", "HuggingFaceTB/SmolLM2-135M-Instruct", files)
        hub.add("dataset", "openai/gsm8k", {"main/train.jsonl": text, "main/test.jsonl": text})
        config, notes = prepare(recipe, words, "train")
        summary = run_train(config, notes, device="cpu")
    assert len(steps_of(summary)) == 2
    assert f"SmolLM2-135M-Instruct@{commit}" in (summary.records / "config.yaml").read_text()
