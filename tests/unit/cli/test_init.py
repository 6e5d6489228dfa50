"""`pentad init` writes a task that runs as it is, overwrites nothing, and says what is wrong."""

import json
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from pentad.cli import init
from pentad.cli.main import app
from pentad.config.load import load_config
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines

SMALL = ["total_train_steps=2", "train_dataset.batch_size=2", "valid_dataset.limit=2"]


def pentad(*words):
    return CliRunner().invoke(app, list(words))


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch):
    for name, task in init.TASKS.items():
        monkeypatch.setitem(init.TASKS, name, replace(task, warm_steps=2))
    monkeypatch.setattr(init, "NUM_WARM", 64)


@pytest.mark.parametrize("task", init.TASKS)
def test_what_is_written_runs_at_once(tmp_path, monkeypatch, task):
    monkeypatch.chdir(tmp_path)
    made = pentad("init", "mytask", "--task", task, "--device", "cpu")
    assert made.exit_code == 0, made.output
    monkeypatch.chdir(tmp_path / "mytask")
    text = (tmp_path / "mytask/recipe.yaml").read_text()
    assert 10 <= len(text.splitlines()) <= 17 and text.count("#") >= 6
    is_warm = task in ("math", "agent")
    assert any((tmp_path / "mytask/model").glob("*.safetensors")) is is_warm
    assert ("init_from_scratch: true" in text) is not is_warm
    for shown in (text, made.output):
        assert ("writes no programs" in shown) is (task == "code")
    command = init.TASKS[task].command
    assert f"pentad {command} recipe.yaml" in made.output
    done = pentad(command, "recipe.yaml", *SMALL)
    assert done.exit_code == 0, done.output
    for noise in (
        "it overrides",
        "chat_template",
        "warning:",
    ):  # nothing that its own recipe causes
        assert noise not in made.output + done.output
    assert "model/         the tiny model" in made.output
    assert "2 steps done" in done.output
    (steps,) = (tmp_path / "mytask/runs/logs").rglob("steps.jsonl")
    assert len(list(read_lines(steps))) == 2


@pytest.mark.parametrize("task", init.TASKS)
def test_a_model_of_the_hub_is_written_by_its_name_and_planned(tmp_path, monkeypatch, task):
    monkeypatch.chdir(tmp_path)
    words = ("--task", task, "--model", "Qwen/Qwen3-0.6B", "--device", "cuda")
    assert pentad("init", "mytask", *words).exit_code == 0
    assert not (tmp_path / "mytask/model").exists()
    monkeypatch.chdir(tmp_path / "mytask")
    config = load_config("recipe.yaml", [])
    assert config.actor.path == "Qwen/Qwen3-0.6B" and config.train_dataset.chat_template is True
    if task == "math":  # the others differ in keys that the rules check
        planned = pentad("plan", "recipe.yaml", "--gpu-memory", "80")
        assert planned.exit_code == 0 and "Fits" in planned.output, planned.output
        assert "reward.py:score: imported and tried on a row" in planned.output
    prepare("recipe.yaml", [], "plan")


def test_held_out_rows_are_not_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for task in ("math", "sft"):
        assert pentad("init", task, "--task", task, "--model", "Qwen/Qwen3-0.6B").exit_code == 0
        train, valid = (
            (tmp_path / task / f"{name}.jsonl").read_text().splitlines()
            for name in ("train", "valid")
        )
        assert not set(train) & set(valid) and len(valid) == init.NUM_VALID


@pytest.mark.parametrize("has_template", [True, False])
def test_a_folder_is_written_as_a_whole_path(tmp_path, monkeypatch, has_template):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model/config.json").write_text("{}")
    if has_template:
        (tmp_path / "my model/chat_template.jinja").touch()
    assert pentad("init", "mytask", "--model", "my model").exit_code == 0
    recipe = yaml.safe_load((tmp_path / "mytask/recipe.yaml").read_text())
    assert recipe["actor"]["path"] == str(tmp_path / "my model")
    assert recipe["train_dataset"].get("chat_template", False) is has_template


def test_all_that_is_wrong_is_said_and_nothing_is_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/recipe.yaml").write_text("seed: 1\n")
    wrong = pentad("init", "mine", "--task", "chess", "--model", "m", "--device", "tpu")
    assert wrong.exit_code == 2
    assert wrong.output.splitlines()[1:] == [
        "* FOLDER = mine: is not empty, and nothing is overwritten; give the name of a new folder, "
        "or of an empty one.",
        "* --task = chess: there is no such task; give one of math, code, agent or sft.",
        "* --model = m: neither a folder with a config.json nor a name on the hub; give OWNER/NAME "
        "such as Qwen/Qwen3-0.6B, a folder, or tiny.",
        "* --device = tpu: no such device; give auto, cpu or cuda.",
    ]
    assert [file.read_text() for file in (tmp_path / "mine").iterdir()] == ["seed: 1\n"]
    assert "there is no terminal for a prompt; give one: pentad init" in pentad("init").output


def test_on_a_terminal_it_asks_for_what_was_not_given(tmp_path, monkeypatch):
    asked = []

    def answer(question, default):
        asked.append(question.split()[0])
        return {"Folder": str(tmp_path / "mine"), "Model": "Qwen/Qwen3-8B"}.get(asked[-1], default)

    monkeypatch.setattr(init.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(init.typer, "prompt", answer)
    init.run_init(None, "sft", None, None)
    assert asked == ["Folder", "Model", "Device"]
    rows = (tmp_path / "mine/train.jsonl").read_text().splitlines()
    assert set(json.loads(rows[0])) == {"prompt", "response"}
