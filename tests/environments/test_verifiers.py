"""`verifiers:ID` against the package, which has an environment of its own
(`make test-environments`)."""

import json
import os
import sys
from pathlib import Path

import pytest
from sections import data_source

from pentad.core.errors import RunError, UserError
from pentad.data.toy import write_byte_model
from pentad.planner.prepare import prepare
from pentad.rollout.executor import load_workflow
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.rollouts import run_train

if "PENTAD_TEST_VERIFIERS" not in os.environ:
    pytest.skip("make test-environments makes what it needs", allow_module_level=True)
PYTHON = Path(os.environ["PENTAD_TEST_VERIFIERS"]).absolute()
SUMS = f"verifiers:vf_sums?python={PYTHON}"


@pytest.fixture(autouse=True)
def beside_the_environment(monkeypatch):
    """An environment may be a module of the folder in which a run starts."""
    monkeypatch.chdir(Path(__file__).parent)


def test_tasks_are_rows_and_options_are_the_tasksets():
    rows = data_source(path=f"{SUMS}&first=3&size=2").open(streaming=False)
    assert len(rows) == 2 and rows.row(1)["prompt"] == "3+1="
    assert json.loads(rows.row(1)["verifiers"])["answer"] == "4"
    assert len(data_source(path=SUMS).open(streaming=False)) == 5
    wrong = {"&second=1": "second", "&size=0": "size = 0 is no number"}
    for option, said in wrong.items():
        with pytest.raises(UserError, match=said):
            data_source(path=SUMS + option).open(streaming=False)


def test_what_cannot_be_loaded_is_named():
    with pytest.raises(UserError, match=r"verifiers:nothing.*taskset 'nothing' not found"):
        load_workflow(f"verifiers:nothing?python={PYTHON}")
    with pytest.raises(UserError, match="there is no interpreter /nowhere"):
        load_workflow("verifiers:vf_sums?python=/nowhere")
    with pytest.raises(UserError, match=r"pip install verifiers uv"):
        load_workflow(f"verifiers:vf_sums?python={sys.executable}")


def train(folder, *more):
    write_byte_model(folder / "bytes")
    words = [f"actor.path={folder / 'bytes'}", "actor.init_from_scratch=true"]
    words += [f"fileroot={folder}", f"rollout.workflow={SUMS}", "train_dataset.batch_size=2"]
    words += ["gconfig.n_samples=2", "gconfig.max_new_tokens=4", "total_train_steps=1", *more]
    config, notes = prepare(None, words, "train")
    return run_train(config, notes, fresh=False, device="cpu")


def test_a_policy_is_trained_on_the_rewards_of_a_rubric(tmp_path):
    summary = train(tmp_path)
    (step,) = [line for line in read_lines(summary.records / "steps.jsonl") if "step" in line]
    assert step["num_samples"] == 4
    for line in read_lines(summary.records / "samples.jsonl"):
        assert "+" in line["prompt"] and "<|im_start|>user" in line["prompt"]
        assert line["reward_parts"] == {"correct": 0.0, "asked": 0.25}
        assert line["reward"] == 0.25 and sum(b - a for a, b in line["trained_spans"]) >= 1


@pytest.mark.parametrize(
    ("answer", "said"), [("raise", "the rubric broke"), ("die", "the process of .* ended")]
)
def test_an_episode_that_fails_is_tried_again_and_never_scored(tmp_path, answer, said):
    task = json.dumps({"prompt": "1+1=", "answer": answer})
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "verifiers": task}))
    rows = f"train_dataset.path={tmp_path / 'rows.jsonl'}"
    with pytest.raises(Exception, match=said):
        train(tmp_path, rows, "train_dataset.batch_size=1", "rollout.max_retries=0")


def test_rows_of_another_dataset_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    with pytest.raises(RunError, match="a row has no column 'verifiers'"):
        train(tmp_path, f"train_dataset.path={tmp_path / 'rows.jsonl'}")
