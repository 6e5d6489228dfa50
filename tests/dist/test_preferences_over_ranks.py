"""Preference runs over ranks: losses, margins and weights of one process."""

import json

import pytest
import torch
from run_cases import config_of, run_ranks
from safetensors.torch import load_file

from pentad.data.toy import write_model
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import ON_EXAMPLES

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
    for command in ("dpo", "reward-model"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{command}.jsonl").write_text(lines)
    return folder


def found(records, model):
    steps = [[one["loss"], one["preference"]["margin"]] for one in read_lines(records)]
    return torch.tensor(steps), load_file(model)


@pytest.fixture(scope="module")
def alone(task, tmp_path_factory):
    torch.set_num_threads(1)
    results = {}
    for command in ("dpo", "reward-model"):
        root = tmp_path_factory.mktemp("alone")
        config, notes = config_of(task, root, command, "alone", *SETTINGS)
        summary = ON_EXAMPLES[command](config, notes, device="cpu")
        model = summary.model / "model.safetensors"
        results[command] = found(summary.records / "steps.jsonl", model)
    return results


CASES = [("dpo", one) for one in ("d2", "t2", "p2")]
CASES += [("reward-model", one) for one in ("t2", "p2")]


@pytest.mark.parametrize("command, layout", CASES)
def test_the_pairs_of_a_step_are_compared_across_ranks(task, tmp_path, alone, command, layout):
    summary = run_ranks(
        command=command,
        task=task,
        root=tmp_path,
        trial=layout,
        overrides=[*SETTINGS, f"allocation_mode=archon:{layout}"],
    )
    records, model = summary.records, summary.model
    steps, weights = found(records / "steps.jsonl", model / "model.safetensors")
    expected_steps, expected_weights = alone[command]
    torch.testing.assert_close(steps, expected_steps, rtol=1e-4, atol=1e-5)
    for name, expected in expected_weights.items():
        # AdamW makes a whole step of a gradient that is rounding: such elements are few.
        apart = (weights[name] - expected).abs()
        assert (apart > 5e-5).float().mean() <= 1e-3, name
        assert apart.max() < 1e-3, name
