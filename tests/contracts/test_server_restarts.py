"""Runs over servers that they started: one that dies is started again with the newest weights."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sglang_stand_in import write_environment
from tables import table

from pentad.data.toy import write_model, write_task
from pentad.telemetry.steps import read_lines

MIXTURE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_task(folder, seed=5, num_train=64, num_sft=64, num_valid=16)
    write_environment(folder / "env", "0.5.17")
    shutil.copytree(folder / "model", folder / "mixture")
    config = folder / "mixture" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | MIXTURE))
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
        "reward.fn=sort_digits",
        f"rollout.server.python={task / 'env'}",
        "rollout.server.check_weights_every=1",
        *overrides,
    ]
    (root / "recipe.yaml").write_text("algorithm: {name: grpo}\n")
    return [sys.executable, "-m", "pentad.cli.main", "train", str(root / "recipe.yaml"), *words]


@pytest.mark.parametrize(
    ("allocation", "processes", "model"),
    table(
        [
            ("sglang:d1|archon:d1", "auto", "mixture"),
            ("sglang:d1+archon:d1", "auto", "model"),
            ("sglang:d1+archon:d1", "separate", "model"),
        ],
        [("sglang:d1+archon:d1", "auto", "model")],
    ),
)
def test_a_server_that_dies_is_started_again_with_the_newest_weights(
    task, tmp_path, allocation, processes, model
):
    """A mixture's routes are replayed, before its server dies and after it."""
    given = [f"allocation_mode={allocation}", f"scheduler.processes={processes}"]
    given += [f"actor.path={task / model}", f"rollout.replay_routes={model == 'mixture'}"]
    num = 6 if processes == "auto" else 3
    asked = command(task, tmp_path, *given, f"total_train_steps={num}")
    with subprocess.Popen(
        asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        folder = wait_for(lambda: next((tmp_path / "logs").glob("*/*/*"), None), run)
        steps = folder / "steps.jsonl"
        wait_for(lambda: steps.exists() and any("step" in r for r in read_lines(steps)), run)
        (server,) = servers_of(run.pid)
        os.kill(server, signal.SIGKILL)
        told, _ = run.communicate(timeout=500)
    assert run.returncode == 0, told
    records = [r for r in read_lines(steps) if "step" in r]
    assert [r["step"] for r in records] == list(range(1, num + 1))
    assert all(r["infra"]["publish_mb"] > 0 for r in records)
    rerouted = {r["rl"]["rerouted_share"] for r in records}
    assert rerouted == {0.0 if model == "mixture" else None}
    log = (folder / "log.txt").read_text()
    assert "sglang-0 is lost: it was ended by signal 9" in log, log
    assert "sglang-0 serves again" in log, log
    assert not [pid for pid in servers() if output_of(pid).is_relative_to(tmp_path)]


@pytest.mark.ray
def test_ray_places_a_server_and_one_that_dies_is_started_again(task, tmp_path):
    """The process that Ray started ends with its server; its next one pulls the newest weights."""
    pytest.importorskip("ray")
    given = ["scheduler.type=ray", "allocation_mode=sglang:d1+archon:d1", "total_train_steps=3"]
    with subprocess.Popen(
        command(task, tmp_path, *given),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        folder = wait_for(lambda: next((tmp_path / "logs").glob("*/*/*"), None), run)
        steps = folder / "steps.jsonl"
        wait_for(lambda: steps.exists() and any("step" in r for r in read_lines(steps)), run)
        (server,) = [one for one in servers() if output_of(one).is_relative_to(tmp_path)]
        assert f"\nPPid:\t{run.pid}\n" not in status(server)
        os.kill(server, signal.SIGKILL)
        told, _ = run.communicate(timeout=500)
    assert run.returncode == 0, told
    records = [r for r in read_lines(steps) if "step" in r]
    assert [r["step"] for r in records] == [1, 2, 3]
    log = (folder / "log.txt").read_text()
    assert "sglang-0 is lost" in log and "sglang-0 serves again" in log, log
    assert not [pid for pid in servers() if output_of(pid).is_relative_to(tmp_path)]


def test_a_server_that_never_stays_ends_the_run_with_a_sentence(task, tmp_path):
    env = write_environment(tmp_path / "env")
    broken = env / "site" / "sglang" / "launch_server.py"
    asked = command(
        task, tmp_path, f"rollout.server.python={env}", "allocation_mode=sglang:d1|archon:d1"
    )
    broken.write_text("raise SystemExit('no GPU for me')\n")
    done = subprocess.run(asked, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "sglang-0 ended with exit code 1" in done.stderr and "no GPU for me" in done.stderr


def wait_for(found, run, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while not (value := found()):
        assert run.poll() is None, run.stdout.read()
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.05)
    return value


def servers() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"sglang.launch_server" in words:
            found.append(int(path.parts[2]))
    return found


def servers_of(pid: int) -> list[int]:
    return [one for one in servers() if f"\nPPid:\t{pid}\n" in status(one)]


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


def output_of(pid: int) -> Path:
    try:
        return Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:
        return Path()
