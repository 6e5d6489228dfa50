"""Whole runs over a real vLLM that the run starts in its own environment and ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
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


def command(task, root, *overrides) -> list[str]:
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
    return [sys.executable, "-m", "pentad.cli.main", "train", str(root / "recipe.yaml"), *words]


def train(task, root, *overrides):
    asked = command(task, root, *overrides)
    return subprocess.run(asked, capture_output=True, text=True, timeout=500)


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
    assert not writers_of(folder)


def test_a_run_starts_one_of_two_servers_again(task, tmp_path):
    """Killed between two steps: its groups are drawn by the other until it is back."""
    asked = command(task, tmp_path, "allocation_mode=vllm:d2+archon:d1", "total_train_steps=12")
    with subprocess.Popen(
        asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        folder = wait_for(lambda: next((tmp_path / "logs").glob("*/*/*"), None))
        wait_for(lambda: (folder / "steps.jsonl").exists() and read_lines(folder / "steps.jsonl"))
        for pid in writers_of(folder / "servers" / "vllm-1.log"):
            os.kill(pid, signal.SIGKILL)
        told, _ = run.communicate(timeout=400)
    assert run.returncode == 0, told
    steps = [r["step"] for r in read_lines(folder / "steps.jsonl") if "step" in r]
    assert steps == list(range(1, 13))
    log = (folder / "log.txt").read_text()
    assert "vllm-1 is lost: it was ended by signal 9" in log
    assert not writers_of(folder)


def wait_for(found, timeout_s=200):
    deadline = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.05)
    return value


def writers_of(path: Path) -> list[int]:
    """Processes whose output goes to a file there."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith(str(path)):
            found.append(int(link.parts[2]))
    return found
