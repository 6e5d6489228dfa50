"""Preference runs over ranks: losses, margins and weights of one process."""

import json
from pathlib import Path

import pytest
import torch
from run_cases import config_of
from safetensors.torch import load_file

from pentad.data.toy import write_model
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import run_dpo

pytestmark = pytest.mark.dist

SETTINGS = ["total_train_steps=3", "actor.optimizer.lr=1e-3", "actor.mb_spec.n_mbs=2"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    write_model(folder / "model")
    digits = [f"{n * 7919 % 100000:05d}" for n in range(1, 17)]
    rows = [
        {"prompt": f"{d}>", "chosen": "".join(sorted(d)), "rejected": d[: 1 + n % 5]}
        for n, d in enumerate(digits)
    ]
    (folder / "dpo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def found(records, model):
    steps = [[one["loss"], one["preference"]["margin"]] for one in read_lines(records)]
    return torch.tensor(steps), load_file(model)


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("alone")
    config, notes = config_of(task, root, "dpo", "alone", *SETTINGS)
    summary = run_dpo(config, notes, device="cpu")
    return found(summary.records / "steps.jsonl", summary.model / "model.safetensors")


@pytest.mark.parametrize("layout", ["d2", "t2", "p2"])
def test_the_pairs_of_a_step_are_compared_across_ranks(pool, task, tmp_path, alone, layout):
    summary = pool.run(
        2,
        "run_cases",
        "run_here",
        command="dpo",
        task=task,
        root=tmp_path,
        trial=layout,
        overrides=[*SETTINGS, f"allocation_mode=archon:{layout}"],
    )
    records, model = Path(summary["records"]), Path(summary["model"])
    steps, weights = found(records / "steps.jsonl", model / "model.safetensors")
    torch.testing.assert_close(steps, alone[0], rtol=1e-4, atol=1e-5)
    for name, expected in alone[1].items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=5e-5)
