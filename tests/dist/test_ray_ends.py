"""A run whose Ray cluster ends under it: a sentence, exit.json, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_cases import settings_of

from pentad_tools.chaos.broken_run import SHARED, open_files
from pentad.data.toy import write_model, write_task

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


@pytest.mark.parametrize("command", ["train", pytest.param("sft", marks=pytest.mark.full)])
def test_a_run_ends_with_a_sentence_when_the_head_of_its_cluster_is_killed(tmp_path, command):
    write_model(tmp_path / "model")
    write_task(tmp_path, seed=5, num_train=16, num_sft=16, num_valid=2)
    layout = {"sft": "archon:d2", "train": "embedded:d1+archon:d1"}[command]
    more = ["scheduler.type=ray", "total_train_steps=4000", "total_train_epochs=4000"]
    words = settings_of(tmp_path, tmp_path, command, "met", *more, f"allocation_mode={layout}")
    records = tmp_path / "logs/me/default/met"
    given = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    run = subprocess.Popen(
        [sys.executable, "-m", "pentad.cli.main", command, *words],
        env={**given, "OMP_NUM_THREADS": "1"},
        stdout=(tmp_path / "out.txt").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        until = time.monotonic() + 300
        while not (records / "steps.jsonl").exists() or not (records / "steps.jsonl").read_text():
            assert run.poll() is None and time.monotonic() < until, (tmp_path / "out.txt").read_text()
            time.sleep(0.1)
        shared = {Path(one[0]) for name in open_files(run.pid) if (one := SHARED.match(name))}
        os.kill(head_of(run.pid), signal.SIGKILL)
        struck = time.monotonic()
        assert run.wait(timeout=55) == 1, "before Ray ends the process"
    finally:
        run.kill()
    said = (tmp_path / "out.txt").read_text()
    assert "the Ray cluster at " in said and "has ended: its head has accepted no" in said
    assert "Traceback" not in said and "Failed to connect to GCS" not in said
    end = json.loads((records / "exit.json").read_text())
    assert end["end"] == "failed" and "the Ray cluster at " in end["reason"]
    assert shared or command == "sft", "samples and weights on their way"
    assert not [path for path in shared if path.exists()]
    assert time.monotonic() - struck < 60
