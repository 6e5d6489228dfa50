"""Ends the processes of a Ray cluster with the run that started it: `python -m
pentad.runtime.ray_guard FOLDER PARENT`, a process that outlives its parent for a moment.

Ray's head ends with the program that started it, but the node's agents and actors run for up to a
minute after a SIGKILL, and some remain after a normal end. All inherit a variable that names the
folder of the cluster, by which the guard finds them.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pentad.core.scratch import scratch_folder
from pentad.runtime.process import Child

log = logging.getLogger(__name__)

VARIABLE = "PENTAD_RAY_FOLDER"
"""Environment variable of all processes of the cluster: the folder of the cluster."""
WATCH_S, LOOK_S = 0.5, 0.1
QUIET_LOOKS = 3
"""Required scans in a row without a process: a starting one may have no variables yet."""
END_S = 20.0


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for a cluster's sockets and logs. Processes with its path in VARIABLE are ended with
    this program or the block. The path is short: that of a socket has at most 107 bytes."""
    with scratch_folder("pentad-ray-", Path("/tmp")) as folder:
        if sys.platform != "linux":  # other systems do not list the variables of processes
            yield folder
            return
        nowhere = subprocess.DEVNULL
        command = [sys.executable, "-m", "pentad.runtime.ray_guard", str(folder), str(os.getpid())]
        guard = Child.start(command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)
        try:
            yield folder
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            if not guard.wait(END_S):
                log.warning("some processes of the Ray cluster in %s did not end", folder)
            guard.end()
            if guard.code != 0:  # Ray may kill the children of a program that leaves it
                end_all(str(folder))


def main(folder: str, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # these only stop the run
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == parent and not select.select([0], [], [], WATCH_S)[0]:
        pass
    end_all(folder)
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)


def end_all(folder: str) -> None:
    """Kills processes until none is left: live ones may start others meanwhile."""
    until, quiet = time.monotonic() + END_S, 0
    while quiet < QUIET_LOOKS and time.monotonic() < until:
        found = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]
        others = [pid for pid in found if pid not in (os.getpid(), os.getppid())]
        ended = [pid for pid in others if end_member(pid, folder)]
        quiet = 0 if ended else quiet + 1
        time.sleep(LOOK_S)


def end_member(pid: int, folder: str) -> bool:
    """Kills a process if it belongs to the cluster; returns whether it did."""
    with suppress(OSError):  # it has ended or belongs to another user
        watch = os.pidfd_open(pid)
        try:
            if is_member(Path(f"/proc/{pid}"), os.fsencode(folder)):
                signal.pidfd_send_signal(watch, signal.SIGKILL)
                return True
        finally:
            os.close(watch)
    return False


def is_member(process: Path, folder: bytes) -> bool:
    """Whether a process has the cluster's variable, or an open file of its session: the title that
    an agent gives itself may cover its variables. Zombies have neither."""
    mark = VARIABLE.encode() + b"=" + folder
    if mark in (process / "environ").read_bytes().split(b"\0"):
        return True
    session = f"{os.fsdecode(folder)}/session_"
    return any(str(link.readlink()).startswith(session) for link in (process / "fd").iterdir())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
