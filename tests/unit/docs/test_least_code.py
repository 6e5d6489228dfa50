"""The table of the least code for a task with a tool: its counts, and that ours runs."""

import json
import re
import runpy
from pathlib import Path

import pytest

import pentad
from pentad.data.toy import write_byte_model
from pentad.telemetry.steps import read_lines

ROOT = Path(__file__).parents[3]
CODE = ROOT / "examples" / "least_code"
SYSTEMS = {"Pentad": "pentad_note.py", "TRL": "trl_note.py", "verl": "verl/*"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_table_counts_files_and_lines(system):
    files = sorted(path for path in CODE.glob(SYSTEMS[system]) if path.is_file())
    lines = [line for path in files for line in path.read_text().splitlines() if line.strip()]
    page = (ROOT / "docs" / "environments.md").read_text()
    (row,) = re.findall(rf"^\| {system} .*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert (int(row[0]), int(row[1])) == (len(files), len(lines))


def test_ours_runs_as_it_stands(tmp_path, monkeypatch):
    """With a tiny model, whose template shows tools, for the one that it names."""
    write_byte_model(tmp_path / "bytes", with_tools=True)
    small = {"actor.path": str(tmp_path / "bytes"), "actor.init_from_scratch": True}
    small |= {"train_dataset.batch_size": 2, "gconfig.n_samples": 2, "gconfig.max_new_tokens": 4}
    small |= {"total_train_steps": 1, "fileroot": str(tmp_path / "runs")}
    train, runs = pentad.train, []

    def tiny(recipe, **given):
        runs.append(train({**recipe, **small}, **given))

    monkeypatch.setattr(pentad, "train", tiny)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(CODE / "pentad_note.py"), run_name="__main__")
    (run,) = runs
    lines = read_lines(run.records / "samples.jsonl")
    assert lines and all("read_note(page)" in line["prompt"] for line in lines)
    assert json.loads((run.records / "exit.json").read_text())
