"""Break-out attempts that a pool runs at its start to find protections missing on this machine.

Each attempt acts like a hostile job. It returns if it succeeded, and raises if not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pentad.rewards.confine import PR_SET_PDEATHSIG, Limits, prctl

THREAD_STACK = 256 << 10
"""Thread stack size: the minimum of every architecture is below it; 64 KiB is too little on ARM."""
HELD = (OSError, RuntimeError, MemoryError)
"""Errors raised by an attempt that was prevented."""
MEANING = {
    "processes": "start processes",
    "network": "open connections",
    "isolation from other processes": "end, limit and slow down other processes of its user",
    "ending with its worker": "outlive the run",
    "reading files": "read the files of its user",
    "writing files": "change the files of its user",
    "memory": "take more memory than its limit",
    "threads": "start any number of threads",
    "total size of files": "fill the disk",
}
"""What a job can do without this protection."""
AMOUNTS = {"threads", "total size of files"}
"""Protections without which a job still cannot reach anything outside: the pool only warns."""


@contextlib.contextmanager
def bait(folder: str) -> Iterator[dict[str, Any]]:
    """Makes objects that a job must not reach, as arguments of `missing`: a file that every user
    may read and write, and a listening port."""
    descriptor, file = tempfile.mkstemp(dir=folder)
    os.fchmod(descriptor, 0o666)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            yield {"file": file, "port": listener.getsockname()[1]}
    finally:
        os.close(descriptor)
        Path(file).unlink()


def missing(limits: Limits, file: str, port: int) -> list[str]:
    """Returns the missing protections of this process, as keys of MEANING."""
    if limits.allow_processes:
        return []
    attempts: dict[str, Callable[[], object]] = {"processes": _fork}
    if limits.isolate:
        attempts |= {
            "network": lambda: socket.create_connection(("127.0.0.1", port), 1.0),
            "isolation from other processes": _signal_parent,
            "ending with its worker": lambda: prctl(PR_SET_PDEATHSIG, 0),
            "reading files": Path(file).read_text,
            "writing files": lambda: os.truncate(file, 0),
            "memory": lambda: os.memfd_create("more"),
            "threads": lambda: _start_threads(limits.max_threads + 1),
            "total size of files": lambda: _fill(limits.max_file_bytes),
        }
    return [name for name, attempt in attempts.items() if _gets_through(attempt)]


def _gets_through(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except HELD:
        return False
    return True


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _signal_parent() -> None:
    """Signals the parent as the owner of a pipe, which the kernel signals on each write."""
    read_end, _ = os.pipe()
    if os.getppid() == 0:
        raise ProcessLookupError("no process outside of this namespace has a pid in it")
    fcntl.fcntl(read_end, fcntl.F_SETOWN, os.getppid())


def _start_threads(num: int) -> None:
    over = threading.Event()
    old = threading.stack_size(THREAD_STACK)
    try:
        for _ in range(num):
            threading.Thread(target=over.wait, daemon=True).start()
    finally:
        over.set()
        threading.stack_size(old)


def _fill(num_bytes: int) -> None:
    """Writes one and a half times the limit, in three files."""
    for name in "abc":
        file = os.open(name, os.O_CREAT | os.O_WRONLY)
        os.posix_fallocate(file, 0, num_bytes // 2)
        os.close(file)
