"""Machines that are lost for good and return: torchrun's agents, nodes of a Ray cluster.

Each machine is stood for by processes of its own on this one.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from process_state import process_restored
from run_cases import config_of, settings_of

from pentad.data.toy import write_byte_model
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import run_pretrain

pytestmark = [pytest.mark.dist, pytest.mark.full, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CLOSE = 1e-5
LIMIT_S = 500.0
STEPS = 6
GIVEN = (
    *("train_dataset.max_length=48", "train_dataset.batch_size=4", f"total_train_steps={STEPS}"),
    *("actor.optimizer.lr=1e-3", "recover.freq_steps=1", "saver.mode=sync"),
)
ELASTIC = ("elastic.enabled=true", "elastic.standbys=false")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_byte_model(folder / "model", num_experts=8)
    lines = [f"{n} is followed by {n + 1}; " * (1 + n % 4) for n in range(30)]
    told = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (folder / "pretrain.jsonl").write_text(told)
    return folder


@pytest.fixture(scope="module")
def truth(texts, tmp_path_factory):
    """The records of the run that nobody disturbed, in one process."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("truth")
    config, notes = config_of(texts, folder, "pretrain", "alone", *GIVEN)
    return read_lines(run_pretrain(config, notes, device="cpu").records / "steps.jsonl")


def wait_for(condition, what):
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until, f"{LIMIT_S:g} s without {what}"
        time.sleep(0.05)


def check_steps(records, truth):
    lines = read_lines(records / "steps.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for name in ("rows_digest", "num_tokens"):
        assert [line[name] for line in lines] == [line[name] for line in truth]
    losses = [[line["loss"] for line in found] for found in (lines, truth)]
    assert losses[0] == pytest.approx(losses[1], rel=CLOSE)
    return lines


class Machine:
    """An agent of torchrun and the ranks it starts."""

    def __init__(self, words, output, environment):
        self.output = output.open("ab")
        self.agent = subprocess.Popen(
            [ROOT / "scripts" / "launch.sh", *words],
            env=environment,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def processes(self):
        """The agent's, and those of its ranks: each rank is the first of a session of its own."""
        found, parents = {self.agent.pid}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            parents[int(stat.parent.name)] = int(fields[1])
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found

    def lose(self):
        """As if its power were cut."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.agent.wait()

    def close(self):
        if self.agent.poll() is None:
            self.lose()
        self.output.close()


@contextmanager
def closed_at_end():
    machines = []
    try:
        yield machines
    finally:
        for machine in machines:
            machine.close()


def test_agents_of_torchrun_go_on_without_a_lost_one(texts, tmp_path, truth):
    """Two agents with a rank each; one is lost in step 3, and another one comes in step 5."""
    words = settings_of(texts, tmp_path, "pretrain", "met", *GIVEN, *ELASTIC)
    words += ["allocation_mode=archon:(attn:d2|ffn:e2)"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    holds = [f"at=forward step={step} do=hold note={tmp_path}/held{step}" for step in (3, 5)]
    plain = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment = plain | {
        **{"NUM_NODES": "1:2", "GPUS_PER_NODE": "1", "RDZV_ENDPOINT": f"localhost:{port}"},
        **{"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "RUN_ID": "met"},
        **{"PENTAD_FAULT": ";".join(holds), "OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO"},
    }
    soon = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=10"
    records = tmp_path / "logs/me/default/met"
    said = [tmp_path / f"agent{number}.log" for number in range(3)]

    def start(number):
        host = {"RDZV_CONF": f"is_host={int(number == 0)},{soon}"}
        return Machine(words, said[number], environment | host)

    with closed_at_end() as machines:
        machines += [start(0), start(1)]
        wait_for((tmp_path / "held3.0").exists, "step 3")
        lost_at = time.monotonic()
        machines[1].lose()
        (tmp_path / "held3.go").touch()
        wait_for(lambda: len(read_lines(records / "steps.jsonl")) >= 3, "a step with one rank")
        took_s = time.monotonic() - lost_at
        wait_for((tmp_path / "held5.0").exists, "step 5")
        machines.append(start(2))
        wait_for(lambda: " new nodes from " in said[0].read_text(), "the agent that joins")
        (tmp_path / "held5.go").touch()
        for machine in (machines[0], machines[2]):
            machine.agent.wait(LIMIT_S)
        assert machines[0].agent.returncode == 0, said[0].read_text()
    check_steps(records, truth)
    log = (records / "log.txt").read_text()
    print(f"{took_s:.1f} s from the loss of an agent to the next step")
    assert "elastic: archon:(attn:d1|ffn:e1) for archon:(attn:d2|ffn:e2) on 1 ranks" in log
    assert "stopped by SIGTERM after 5 of 6 steps" in log
    shards = re.findall(r"pentad\.engine\.engine: initialized .* dp_shard=(\d)", log)
    assert shards == ["2", "1", "2"]


@contextmanager
def ray_nodes():
    """A cluster of two nodes, each with room for one rank."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with process_restored():
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_agent_register_timeout_ms": "120000"}
        room = {"num_cpus": 1, "object_store_memory": 100 << 20}
        cluster = Cluster(initialize_head=True, head_node_args=room | {"include_dashboard": False})
        try:
            ray.init(cluster.address, log_to_driver=False, logging_level="warning")
            yield ray, cluster, lambda: cluster.add_node(**room)
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.mark.ray
def test_a_run_on_ray_goes_on_without_a_lost_node_and_takes_a_new_one(texts, tmp_path, truth):
    """The node is lost in step 3; another one comes in step 5."""
    words = [*GIVEN, *ELASTIC, "scheduler.type=ray", "allocation_mode=archon:(attn:d2|ffn:e2)"]
    config, notes = config_of(texts, tmp_path, "pretrain", "met", *words)
    records, left = tmp_path / "logs/me/default/met", {2: "lose", 4: "add"}
    plain, seen, lost_at = Recorder.step, [], []
    with ray_nodes() as (ray, cluster, add):
        nodes = [add()]

        def step(self, record, *args):
            line = plain(self, record, *args)
            what = left.pop(record.step, None)
            seen.append(json.loads((records / "slots/now.json").read_text())["used"])
            if lost_at and len(lost_at) == 1:
                lost_at.append(time.monotonic())
            if what == "lose":
                lost_at.append(time.monotonic())
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            elif what == "add":
                nodes.append(add())
                table = ray.util.placement_group_table
                alive = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
                wait_for(
                    lambda: any(
                        group["state"] == "CREATED"
                        and set(group["bundles_to_node_id"].values()) <= alive
                        for group in table().values()
                    ),
                    "the bundle on the new node",
                )
            return line

        Recorder.step = step
        try:
            run_pretrain(config, notes, device="cpu")
        finally:
            Recorder.step = plain
    print(f"{lost_at[1] - lost_at[0]:.1f} s from the loss of a node to the next step")
    check_steps(records, truth)
    assert [len(used) for used in seen] == [2, 2, 1, 1, 2, 2]
    log = (records / "log.txt").read_text()
    assert "elastic: ranks have returned, the group is re-formed after step 4" in log
