"""A model file from outside the package, named in the config, trains as its family does."""

import json
import shutil

import pytest

from pentad.core.errors import UserError
from pentad.data.toy import write_model, write_task
from pentad.models import families
from pentad.planner.prepare import prepare
from pentad.telemetry.record import comparable
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import run_sft

MINE = """
from dataclasses import replace
from pentad.models.families.qwen3 import SPEC as QWEN3

def read_dims(hf):
    return QWEN3.read_dims({**hf, "model_type": "qwen3"})

SPEC = replace(QWEN3, family="mine", read_dims=read_dims)
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A folder of a known family, the same as of an unknown one, its model file, and data."""
    monkeypatch.setattr(families, "REGISTERED", {})
    write_model(tmp_path / "known")
    shutil.copytree(tmp_path / "known", tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    text = json.dumps({**config, "model_type": "mine"})
    (tmp_path / "own" / "config.json").write_text(text)
    (tmp_path / "mine.py").write_text(MINE)
    write_task(tmp_path, seed=5, num_train=8, num_sft=8, num_valid=2)
    return tmp_path


def sft(task, name, *overrides):
    settings = [
        f"fileroot={task}",
        f"trial_name={name}",
        f"actor.path={task / name}",
        "actor.init_from_scratch=true",
        f"train_dataset.path={task / 'sft.jsonl'}",
        "train_dataset.batch_size=8",
        "total_train_steps=1",
        *overrides,
    ]
    config, notes = prepare(None, settings, "sft")
    return run_sft(config, notes, device="cpu")


def test_a_model_file_of_the_config_trains_as_the_family_it_copies(task):
    with pytest.raises(UserError, match="model_type = mine: no such model family"):
        sft(task, "own")
    runs = [sft(task, "known"), sft(task, "own", f"model_files=[{task}/mine.py:SPEC]")]
    first, second = [read_lines(run.records / "steps.jsonl") for run in runs]
    assert first and [comparable(line) for line in first] == [comparable(line) for line in second]
    assert json.loads((runs[1].model / "config.json").read_text())["model_type"] == "mine"


def test_a_model_file_that_is_not_there_is_told(task):
    with pytest.raises(UserError, match=r"model_files = gone.py:SPEC: there is no file gone.py"):
        sft(task, "known", "model_files=[gone.py:SPEC]")
