"""Whole runs over a real vLLM that the run starts in its own environment and ends."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pentad.data.toy import write_model, write_task
from pentad.telemetry.steps import read_lines

VLLM = os.environ.get("PENTAD_TEST_VLLM", "")
pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(not VLLM or VLLM.startswith("http"), reason="make test-vllm runs it"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The demo's task, and its model with heads that vLLM's attention takes on a CPU."""
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "head_dim": 32}))
    write_task(folder, seed=5, num_train=64, num_sft=64, num_valid=16)
    return folder


def train(task, root, *overrides):
    words = [
        f"fileroot={root}",
        f"actor.path={task / 'model'}",
        "actor.init_from_scratch=true",
        "actor.gradient_checkpointing=false",
        "actor.optimizer.lr=1e-3",
        f"train_dataset.path={task / 'train.jsonl'}",
        "train_dataset.batch_size=4",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=6",
        "rollout.max_running=16",
        "rollout.max_batch_tokens=256",
        "reward.fn=sort_digits",
        f"rollout.server.python={VLLM}",
        *overrides,
    ]
    (root / "recipe.yaml").write_text("algorithm: {name: grpo}\n")
    command = [sys.executable, "-m", "pentad.cli.main", "train", str(root / "recipe.yaml"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


@pytest.mark.parametrize(
    ("allocation", "transport"),
    [("vllm:d1|archon:d1", "disk"), ("vllm:d1+archon:d1", "broadcast")],
    ids=["colocated", "apart"],
)
def test_a_run_trains_on_what_its_vllm_draws(task, tmp_path, allocation, transport):
    done = train(
        task,
        tmp_path,
        f"allocation_mode={allocation}",
        f"rollout.server.weight_transport={transport}",
        "total_train_steps=3",
    )
    assert done.returncode == 0, done.stderr + done.stdout
    (folder,) = (tmp_path / "logs").glob("*/*/*")
    start = json.loads((folder / "manifest.json").read_text())["starts"][0]
    # Other kernels than the trainer's, in fp32.
    assert start["selftest"]["sampler_max_difference"] < 1e-4
    steps = [r for r in read_lines(folder / "steps.jsonl") if "step" in r]
    assert [record["step"] for record in steps] == [1, 2, 3]
    log = (folder / "servers" / "vllm-0.log").read_text()
    assert len(re.findall("Reloading and processing weights", log)) >= 1
    assert not leftovers(folder)


def leftovers(folder) -> list[str]:
    """Server processes whose output goes to the run's folder."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(str(link))
    return found
