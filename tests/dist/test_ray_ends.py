"""A run whose Ray cluster ends under it: a sentence, exit.json, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_cases import settings_of

from pentad.data.toy import write_model, write_task
from pentad_tools.chaos.broken_run import MARK, SHARED, open_files, processes_of

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.dist, pytest.mark.slow]


def head_of(pid):
    """The process of the cluster's head that the run started."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = (folder / "stat").read_text().rpartition(") ")[2].split()[1]
            if parent == str(pid) and b"gcs_server" in (folder / "cmdline").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError("the run has no head of a cluster")


OWN = "/tmp/pentad-ray-"
GUARD = "pentad.runtime.ray_guard"
OTHER = """
import ray, sys
given = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
print(given.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@contextmanager
def another_program():
    """A program with a cluster of its own, which ends as soon as its input does."""
    started = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", OTHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield started, started.stdout.readline().strip()
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


@contextmanager
def started(tmp_path, command, **environment):
    """A run of thousands of steps on Ray that has done one, and the folders in memory it has."""
    write_model(tmp_path / "model")
    write_task(tmp_path, seed=5, num_train=16, num_sft=16, num_valid=2)
    layout = {"sft": "archon:d2", "train": "embedded:d1+archon:d1"}[command]
    more = ["scheduler.type=ray", "total_train_steps=4000", "total_train_epochs=4000"]
    words = settings_of(tmp_path, tmp_path, command, "met", *more, f"allocation_mode={layout}")
    steps = tmp_path / "logs/me/default/met/steps.jsonl"
    given = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    run = subprocess.Popen(
        [sys.executable, "-m", "pentad.cli.main", command, *words],
        env={**given, "OMP_NUM_THREADS": "1", MARK: str(tmp_path), **environment},
        stdout=(tmp_path / "out.txt").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        until = time.monotonic() + 300
        while not steps.exists() or not steps.read_text():
            assert run.poll() is None and time.monotonic() < until, (
                tmp_path / "out.txt"
            ).read_text()
            time.sleep(0.1)
        shared = {Path(one[0]) for name in open_files(run.pid) if (one := SHARED.match(name))}
        assert shared or command == "sft", "samples and weights on their way"
        yield run, shared
    finally:
        run.kill()
        run.wait()


def check_end(tmp_path, run, shared):
    """In less than the minute after which Ray ends the process by itself."""
    assert run.wait(timeout=55) == 1
    said = (tmp_path / "out.txt").read_text()
    assert "the Ray cluster at " in said and "has ended: its head has accepted no" in said
    assert "Traceback" not in said and "Failed to connect to GCS" not in said
    end = json.loads((tmp_path / "logs/me/default/met/exit.json").read_text())
    assert end["end"] == "failed" and "the Ray cluster at " in end["reason"]
    assert not [path for path in shared if path.exists()]
    assert not processes_of(str(tmp_path)), "agents of the node, whose head is gone"


@pytest.mark.parametrize("command", ["train", pytest.param("sft", marks=pytest.mark.full)])
def test_a_run_ends_with_a_sentence_when_the_head_of_its_cluster_is_killed(tmp_path, command):
    with started(tmp_path, command) as (run, shared):
        os.kill(head_of(run.pid), signal.SIGKILL)
        check_end(tmp_path, run, shared)


def test_without_the_guard_of_its_cluster_a_run_ends_the_processes_itself(tmp_path):
    """Ray kills the children of a program that leaves it, in some of its ways to do so."""
    with started(tmp_path, "train") as (run, shared):
        guards = [pid for pid, line in processes_of(str(tmp_path)).items() if GUARD in line]
        for pid in guards:
            os.kill(pid, signal.SIGKILL)
        os.kill(head_of(run.pid), signal.SIGKILL)
        check_end(tmp_path, run, shared)
        assert len(guards) == 1


GONE_S = 10.0
"""Agents of a node that lost its head end by themselves after a minute."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_however_a_run_ends_no_process_and_no_folder_of_its_cluster_is_left(tmp_path, number):
    with started(tmp_path, "train") as (run, _):
        (folder,) = {Path(name).parents[-3] for name in open_files(head_of(run.pid)) if OWN in name}
        lived = processes_of(str(tmp_path))
        assert len(lived) > 5 and folder.is_dir(), lived
        run.send_signal(number)
        run.wait(timeout=60)
        until = time.monotonic() + (GONE_S if number == signal.SIGKILL else 0.0)
        while (left := processes_of(str(tmp_path))) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left and not folder.exists()


@pytest.mark.full
def test_a_run_ends_with_a_sentence_when_the_program_whose_cluster_it_joined_ends(tmp_path):
    with another_program() as (program, address):
        given = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
        with started(tmp_path, "train", **given) as (run, shared):
            program.stdin.close()
            check_end(tmp_path, run, shared)
