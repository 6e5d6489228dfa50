"""Processes of a cluster end with the program that started it. Those here stand in for Ray's, which
are in a session of their own as well, and which a kill of that program leaves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it finds them in /proc")

PROGRAM = """
import os, subprocess, sys, time
from pentad.runtime.ray_guard import VARIABLE, own_folder
with own_folder() as folder:
    command = ["sh", "-c", "trap '' TERM HUP INT; sleep 300 & echo $!; wait; wait"]
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "start_new_session": True}
    of_it = subprocess.Popen(command, env={**os.environ, VARIABLE: str(folder)}, **given)
    other = subprocess.Popen(command, env={**os.environ, VARIABLE: f"{folder}-2"}, **given)
    pids = [pid for one in (of_it, other) for pid in (one.pid, int(one.stdout.readline()))]
    print(folder, *pids, flush=True)
    sys.stdin.readline()
print("left", flush=True)
"""


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("end", ["the block ends", "SIGKILL", "SIGKILL of its group", "SIGINT"])
def test_processes_of_a_cluster_end_with_it_however_its_program_ends(end):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    folder, *pids = program.stdout.readline().split()
    pids = [int(pid) for pid in pids]
    try:
        assert all(map(is_alive, pids)) and Path(folder).is_dir()
        if end == "the block ends":
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == "left\n"
        elif end == "SIGKILL of its group":
            os.killpg(program.pid, signal.SIGKILL)
        else:
            program.send_signal(getattr(signal, end))
        until = time.monotonic() + 20
        while (any(map(is_alive, pids[:2])) or Path(folder).exists()) and time.monotonic() < until:
            time.sleep(0.05)
        assert [is_alive(pid) for pid in pids] == [False, False, True, True], "and no others"
        assert not Path(folder).exists()
    finally:
        program.kill()
        program.communicate()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_the_next_cluster_removes_the_folder_of_one_that_was_killed_with_its_guard(tmp_path):
    from pentad.core.scratch import OWNER
    from pentad.runtime.ray_guard import own_folder

    left = Path("/tmp/pentad-ray-left-by-a-test")
    left.mkdir(mode=0o700)
    (left / OWNER).touch(mode=0o600)
    (left / "session_1").mkdir()
    with own_folder() as folder:
        assert folder.is_dir() and not left.exists()
    assert not folder.exists()
