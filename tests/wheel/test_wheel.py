"""The wheel in its own environment, used from a folder without a checkout: `make test-wheel`
makes the environment and names it in PENTAD_TEST_WHEEL."""

import os
import subprocess
from pathlib import Path

import pytest

NAMED = os.environ.get("PENTAD_TEST_WHEEL")
pytestmark = pytest.mark.skipif(not NAMED, reason="make test-wheel installs the wheel and runs it")
BIN = Path(NAMED or ".").resolve() / "bin"


def pentad(folder, *words, program="pentad"):
    """What the command prints; the environment and the checkout of these tests are out of reach."""
    kept = {
        key: os.environ[key] for key in ("HOME", "LANG", "LOGNAME", "USER") if key in os.environ
    }
    env = {**kept, "PATH": f"{BIN}:/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [BIN / program, *words], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_the_wheel_that_is_used(tmp_path):
    code = "import pentad, pentad_tools; print(pentad.__file__, pentad_tools.__file__)"
    for file in pentad(tmp_path, "-c", code, program="python").split():
        assert BIN.parent in Path(file).parents


def test_help_lists_the_commands_and_doctor_finds_nothing_missing(tmp_path):
    assert " train " in pentad(tmp_path, "--help")
    said = pentad(tmp_path, "doctor")
    assert "all dependencies are installed" in said and "Runs can start here." in said
    assert "pip install -e" not in said  # there is no checkout


def test_the_demo_runs_from_any_folder(tmp_path):
    said = pentad(tmp_path, "demo", "--steps", "3", "--device", "cpu")
    assert "after 3 steps (500 prompts never trained on)" in said
    named = [word for word in said.split() if word.startswith(("docs/", "examples/", "recipes/"))]
    assert named == []  # a wheel has none of these


def test_a_new_task_is_written_and_runs_without_a_checkout(tmp_path):
    pentad(tmp_path, "init", "mytask", "--device", "cpu")
    assert "Placement" in pentad(tmp_path / "mytask", "plan", "recipe.yaml")
    said = pentad(tmp_path / "mytask", "train", "recipe.yaml", "total_train_steps=2")
    assert "2 steps done" in said
