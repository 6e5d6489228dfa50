"""scripts/simulate_node_failure.sh, on processes that look like the ranks of a run."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "simulate_node_failure.sh"
LEAD = """
import os, subprocess, sys
for rank in range(3):
    subprocess.Popen(["sleep", "600"], env={**os.environ, "RANK": str(rank)})
print("ready", flush=True)
sys.stdin.read()
"""


def run(*words, **environment):
    given = {**os.environ, **environment}
    return subprocess.run([SCRIPT, *words], env=given, capture_output=True, text=True, check=False)


@pytest.fixture
def lead(tmp_path):
    given = {k: v for k, v in os.environ.items() if k != "RANK"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", LEAD], stdin=pipe, stdout=pipe, env=given) as lead:
        assert lead.stdout.readline()
        (tmp_path / "run.lock").write_text(f"process {lead.pid} on here since now\n")
        yield psutil.Process(lead.pid)
        for child in psutil.Process(lead.pid).children():
            child.kill()
        lead.stdin.close()


def alive(lead):
    waiting = [one for one in lead.children() if one.status() != psutil.STATUS_ZOMBIE]
    return sorted(one.environ()["RANK"] for one in waiting)


def test_the_highest_ranks_are_dropped_and_no_other_process(lead, tmp_path):
    done = run(tmp_path, "2")
    assert done.returncode == 0, done.stderr
    assert [line.partition(",")[0] for line in done.stdout.splitlines()] == [
        "SIGKILL to rank 2",
        "SIGKILL to rank 1",
    ]
    assert alive(lead) == ["0"]


def test_they_can_be_hung_instead(lead, tmp_path):
    assert "SIGSTOP to rank 2" in run(tmp_path, SIGNAL="STOP").stdout
    assert alive(lead) == ["0", "1", "2"]
    states = {one.environ()["RANK"]: one.status() for one in lead.children()}
    assert states["2"] == psutil.STATUS_STOPPED and states["1"] != psutil.STATUS_STOPPED


def test_a_folder_without_a_run_is_refused(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2 and "no run is under way in it" in done.stderr
