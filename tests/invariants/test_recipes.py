"""Every recipe starts, trains and evaluates; that it learns is measured in docs/recipes.md."""

import importlib.util
import sys
from pathlib import Path

import pytest
from run_lab import steps_of

from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.rollouts import run_train

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def fileroot(tmp_path_factory):
    """With models and data as `make recipes` makes them, imitated for two steps."""
    spec = importlib.util.spec_from_file_location("recipes_run", ROOT / "recipes" / "run.py")
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    runner.IMITATED = dict.fromkeys(runner.IMITATED, 2)
    root = tmp_path_factory.mktemp("recipes")
    runner.prepare_toys(str(root))
    return root


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_and_evaluates(recipe, fileroot, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = (f"fileroot={fileroot}", "total_train_steps=2", "valid_dataset.limit=8")
    sizes = ("train_dataset.batch_size=4", "gconfig.n_samples=4")
    config, notes = prepare(recipe, [*words, *sizes], "train")
    summary = run_train(config, notes, device="cpu")
    steps = steps_of(summary)
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["loss"] is not None for record in steps)
    lines = read_lines(summary.records / "evals.jsonl")
    assert [line["version"] for line in lines] == [0, 2]
    assert all(line["accuracy"] is not None and line["num_failed"] == 0 for line in lines)
