"""Runs on megatron-core by the command line: archon's records, and a killed run that goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pentad.data.toy import write_model, write_task
from pentad.telemetry.steps import read_lines
from pentad.weights.hf import HfFolder
from pentad.weights.regions import full_box

pytestmark = pytest.mark.usefixtures("started_cold")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_task(folder, seed=5, num_train=16, num_sft=16, num_valid=2)
    return folder


def command(task, root, what, trial, *overrides):
    return [
        *(sys.executable, "-m", "pentad.cli.main", what),
        f"fileroot={root}",
        "user=me",
        f"trial_name={trial}",
        f"actor.path={task / 'model'}",
        "actor.init_from_scratch=true",
        "actor.optimizer.lr=1e-2",
        f"train_dataset.path={task / f'{what}.jsonl'}",
        "train_dataset.batch_size=4",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=6",
        "reward.fn=sort_digits",
        *overrides,
    ]


def start(environment, *given):
    done = subprocess.run(command(*given), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def steps_of(root, trial):
    lines = read_lines(root / "logs" / "me" / "default" / trial / "steps.jsonl")
    return [(line["loss"], line["grad_norm"]) for line in lines]


def weights_of(root, trial):
    folder = max((root / "checkpoints" / "me" / "default" / trial / "default").glob("epoch*"))
    reader = HfFolder(folder)
    return {name: reader.read(name, full_box(i.shape)) for name, i in reader.infos.items()}


def test_grpo_over_two_ranks_has_the_records_of_archon(environment, task, tmp_path):
    for trial in ("megatron", "archon"):
        layout = f"allocation_mode=embedded:d1|{trial}:t2"
        start(environment, task, tmp_path, "train", trial, layout, "total_train_steps=2")
    mine, truth = steps_of(tmp_path, "megatron"), steps_of(tmp_path, "archon")
    assert len(mine) == 2
    for one, other in zip(mine, truth, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    found, expected = weights_of(tmp_path, "megatron"), weights_of(tmp_path, "archon")
    assert found.keys() == expected.keys()
    for name in expected:  # Adam's first steps are lr = 1e-2, whatever the gradient
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=2e-4)


def test_a_killed_run_ends_as_one_that_was_not(environment, task, tmp_path):
    """kill -9 of the whole process group after its second step."""
    more = ["allocation_mode=megatron:d1", "total_train_steps=4", "recover.freq_steps=1"]
    start(environment, task, tmp_path, "sft", "whole", *more)
    process = subprocess.Popen(
        command(task, tmp_path, "sft", "cut", *more), env=environment, start_new_session=True
    )
    records = tmp_path / "logs" / "me" / "default" / "cut" / "steps.jsonl"
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        if records.is_file() and len(Path(records).read_text().splitlines()) >= 2:
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    start(environment, task, tmp_path, "sft", "cut", *more)
    assert steps_of(tmp_path, "cut") == steps_of(tmp_path, "whole")
    found, expected = weights_of(tmp_path, "cut"), weights_of(tmp_path, "whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
