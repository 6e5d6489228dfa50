"""A family that is one file outside the package is planned, verified and trained."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from pentad.data.toy import write_model, write_task
from pentad.models import families
from pentad.models.catalog import known_model
from pentad.planner.prepare import prepare
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import run_sft
from pentad_tools.models.model_commands import run_verify_model
from pentad_tools.models.verify import subject_of, verify_subject

FILE = Path(__file__).parent / "cwm.py"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model folder of the family, and data."""
    monkeypatch.setattr(families, "REGISTERED", {})
    write_model(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    own = {"model_type": "cwm", "sliding_window": 8, "bos_token_id": 0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | own))
    write_task(tmp_path, seed=5, num_train=8, num_sft=8, num_valid=2)
    return tmp_path


def settings(folder, *more):
    return [
        *(f"fileroot={folder}", f"actor.path={folder / 'model'}", f"model_files=[{FILE}:SPEC]"),
        *("actor.init_from_scratch=true", f"train_dataset.path={folder / 'sft.jsonl'}"),
        *("train_dataset.batch_size=4", "total_train_steps=2", *more),
    ]


PLAN = """
import sys
from pentad.cli.main import main
sys.argv = ["pentad", "plan", "--json", *sys.argv[1:]]
try:
    main()
finally:
    assert "torch" not in sys.modules, "a plan loads no torch"
"""


def plan(*overrides):
    done = subprocess.run(
        [sys.executable, "-c", PLAN, *overrides], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_it_is_planned_without_torch(folder):
    status, page = plan(*settings(folder, "allocation_mode=archon:d1"))
    dims = families.dims_of(folder / "model", f"{FILE}:SPEC")
    assert dims.sliding_window == 8 and dims.sliding_layers[:2] == (False, True)
    assert status == 0, page
    assert f'"num_params": {dims.num_params}' in page
    without = [s for s in settings(folder, "allocation_mode=archon:d1") if "model_files" not in s]
    status, page = plan(*without)
    assert status == 2 and "model_type = cwm: no such model family" in " ".join(page.split())


def test_its_public_models_can_be_planned_with(folder):
    assert known_model("cwm") is None
    families.register(f"{FILE}:SPEC")
    known = known_model("facebook/cwm")
    assert known is not None and known.num_params == pytest.approx(32e9, rel=0.03)


def test_it_is_verified_against_transformers(folder, capsys):
    """Its own switch among those of all families; a file that reads it otherwise is caught."""
    assert run_verify_model(str(FILE), as_json=True) == 0, capsys.readouterr().out
    outcomes = json.loads(capsys.readouterr().out)["outcomes"]
    assert {"untied", "biases", "windows by their pattern"} <= {
        outcome["case"] for outcome in outcomes
    }
    text = FILE.read_text().replace("layer % 4 != 0", "layer % 4 != 1")
    (folder / "wrong.py").write_text(text)
    subject = subject_of(str(folder / "wrong.py"))
    own = {"windows by their pattern": subject.configs["windows by their pattern"]}
    report = verify_subject(replace(subject, configs=own))
    faults = {outcome.check for outcome in report.outcomes if not outcome.passed}
    assert "config" in faults


def test_it_is_trained(folder):
    config, notes = prepare(None, settings(folder), "sft")
    run = run_sft(config, notes, device="cpu")
    losses = [line["loss"] for line in read_lines(run.records / "steps.jsonl")]
    assert len(losses) == 2 and losses[1] != losses[0]
    saved = transformers.AutoModelForCausalLM.from_pretrained(run.model)
    assert type(saved).__name__ == "CwmForCausalLM"
    assert saved.config.sliding_window == 8
