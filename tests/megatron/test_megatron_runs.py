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
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model
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


@pytest.mark.parametrize(("algorithm", "layout"), [("grpo", "t2"), ("ppo", "d3")])
def test_a_run_over_ranks_has_the_records_of_archon(environment, task, tmp_path, algorithm, layout):
    steps = (f"algorithm.name={algorithm}", "total_train_steps=2")
    for trial in ("megatron", "archon"):
        placement = f"allocation_mode=embedded:d1|{trial}:{layout}"
        start(environment, task, tmp_path, "train", trial, placement, *steps)
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


SEED = """
runner: {{output_dir: {root}, experiment_name: default}}
rollout: {{model_dir: {model}}}
actor:
  training_backend: megatron
  checkpoint_load_path: {start}
megatron:
  use_hf_ckpt: {converts}
  ckpt_convertor:
    model: toy
    model_type: null
    hf_model_path: ${{rollout.model_dir}}
    save_path: ${{runner.output_dir}}/converted_ckpts/actor
    process_num: 2
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 1
"""


def test_the_seed_s_recipe_converts_at_first_and_starts_from_that_later(
    environment, task, tmp_path
):
    """Separated from the sampler the first time, beside it the second, over tensor-parallel files
    both times; keys that have nothing to choose here are left out."""
    model = create_model(dims_of(task / "model"), seed=1)
    save_model(model, tmp_path / "hf", source_folder=task / "model")
    found = {}
    for trial, mode, start in (
        ("first", "hybrid", "null"),
        ("later", "colocate", tmp_path / "converted_ckpts" / "actor"),
    ):
        given = {"root": tmp_path, "model": tmp_path / "hf", "start": start}
        recipe = tmp_path / f"{trial}.yaml"
        recipe.write_text(SEED.format(**given, converts=start == "null"))
        words = command(task, tmp_path, "train", trial, f"mode={mode}", "max_staleness=0")
        left_out = ("fileroot=", "actor.path=", "actor.init_from_scratch=")
        words = [word for word in words if not word.startswith(left_out)]
        words = [*words[:4], str(recipe), *words[4:], "total_train_steps=2"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        found[trial] = steps_of(tmp_path, trial)
    assert len(found["first"]) == 2 and found["first"] == found["later"]
