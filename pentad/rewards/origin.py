"""The process from which a reward worker's jobs are forked; it never has data of a sample.

A job can read all memory of its process, including that of its parent at the fork. So this process
only imports the modules of a reward and forks. The job reads its arguments from a memory file and
writes its result to a pipe; `warden.py` makes both, and this process passes them on unread.
Standard library only.
"""

from __future__ import annotations

import asyncio  # noqa: F401  # once here: each job is a fork, and its function may be async
import contextlib
import dataclasses
import errno
import gc
import json
import math
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from pentad.core.scratch import remove
from pentad.core.specs import describe, load, settled, why_not_loaded
from pentad.rewards import breakout, confine, enclosure

MAX_DETAIL = 1000
MESSAGE_BYTES = 1 << 17
CLEANING_S = 2.0
"""Time limit for removing a job's files, in seconds; the pool removes the rest when it closes."""
OVER = b"over"


class Origin:
    """Forks a job for each message of the warden, and removes its files at the warden's request.

    Messages contain the name of the function and its limits, and descriptors of the file with the
    arguments and of the pipe for the result, which only the job uses.
    """

    def __init__(self, limits: confine.Limits, folder: str, warden: socket.socket) -> None:
        self.limits = limits
        self.folder = folder
        self.warden = warden
        self.enclosure: enclosure.Enclosure | None = None
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.dup2(2, 1)  # output of modules during their import goes to the log
        os.close(nowhere)
        confine.adopt_orphans()
        for name in confine.WHERE_PYTHON_IS if limits.isolate else ():
            os.environ.pop(name, None)

    def hello(self, preload: list[str]) -> None:
        """Imports the modules of rewards, and reports the result."""
        said: dict[str, Any] = {"described": {}, "errors": {}, "refused": ""}
        for spec in preload:
            try:
                said["described"][spec] = describe(spec)
            except BaseException as failure:
                said["errors"][spec] = why_not_loaded(failure)[:MAX_DETAIL]
        gc.collect()
        gc.freeze()  # children share these pages instead of copying them
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        said["address_space_bytes"] = num_pages * os.sysconf("SC_PAGE_SIZE")
        if self.limits.isolate:
            said["refused"] = self._enclose()
        self.warden.sendall(json.dumps(said).encode())

    def _enclose(self) -> str:
        """Encloses this process; returns the reason if namespaces are not available, else ""."""
        try:
            self.enclosure = enclosure.enclose(self.limits)
        except OSError as failure:
            return str(failure)
        return ""

    def serve(self) -> None:
        """Serves until the warden closes its end or exits."""
        while True:
            message, files, _, _ = socket.recv_fds(self.warden, MESSAGE_BYTES, 2)
            if not message:
                return
            self._run(json.loads(message), *files)

    def _run(self, job: dict[str, Any], body: int, pipe: int) -> None:
        inside = self.enclosure
        job["scratch"] = inside.open_scratch() if inside else tempfile.mkdtemp(dir=self.folder)
        job["is_enclosed"] = inside is not None
        before = confine.descendants(os.getpid()) if self.limits.allow_processes else set()
        pid = os.fork()
        if pid == 0:
            self.warden.close()
            be_job(job, self.limits, body, pipe)
        os.close(body)
        os.close(pipe)
        watch = os.pidfd_open(pid)
        with contextlib.suppress(BrokenPipeError):  # the warden has ended: the job is ended below
            socket.send_fds(self.warden, [b"started"], [watch])
            self.warden.recv(len(OVER))
        signal.pidfd_send_signal(watch, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(watch)
        if self.limits.allow_processes:
            confine.end_all(os.getpid(), keep=before)
        inside.close_scratch() if inside else remove(job["scratch"], CLEANING_S)
        with contextlib.suppress(BrokenPipeError):
            self.warden.sendall(json.dumps(status).encode())


# --- in the job ------------------------------------------------------------------------------


def be_job(job: dict[str, Any], limits: confine.Limits, body: int, pipe: int) -> NoReturn:
    """Runs a job in its process; never returns. The first output byte marks the begin of the job:
    earlier failures belong to the pool, not to the job."""
    code = 1
    try:
        _arrange_files(body, pipe, limits.isolate)
        try:
            _prepare(job, limits)
        except BaseException as failure:
            write(pipe, f"-{type(failure).__name__}: {failure}".encode())
            os._exit(1)
        write(pipe, b"+")
        if job["capture"] == "stdout":
            os.dup2(pipe, 1)
            code = _run_program(load(job["spec"]), _arguments(body))
        else:
            write(pipe, _result_of(job["spec"], body, limits))
            code = 0
    finally:
        os._exit(code)


def _prepare(job: dict[str, Any], limits: confine.Limits) -> None:
    if job["is_enclosed"]:
        enclosure.leave_root()
    confine.die_with_parent()
    os.setsid()
    os.chdir(job["scratch"])
    os.environ["TMPDIR"] = tempfile.tempdir = job["scratch"]
    if limits.isolate:
        os.environ["HOME"] = job["scratch"]
        load(job["spec"])  # our module, which the confined job cannot read
    cpu_s = math.ceil(job["timeout_s"]) + 5
    confine.apply(limits, job["scratch"], cpu_s, is_enclosed=job["is_enclosed"])


def probe(limits: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """Runs as a job that tries to break out; returns the missing protections."""
    return breakout.missing(confine.Limits(**limits), **target)


def _arrange_files(body: int, pipe: int, isolate: bool) -> None:
    """Redirects the standard streams to /dev/null."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    if isolate:  # a reward's module may have opened files
        confine.close_all_but(body, pipe)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")


def _stream(descriptor: int, mode: str) -> TextIO:
    return cast(TextIO, open(descriptor, mode, closefd=False))  # noqa: PTH123, SIM115


def _arguments(body: int) -> dict[str, Any]:
    with open(body, "rb") as file:  # noqa: PTH123
        return cast(dict[str, Any], pickle.load(file))


def _result_of(spec: str, body: int, limits: confine.Limits) -> bytes:
    try:
        value = settled(load(spec)(**_arguments(body)))
        return json.dumps({"value": value}, default=_plain).encode()
    except BaseException as failure:
        kind = "memory" if isinstance(failure, MemoryError) else "error"
        detail = f"{type(failure).__name__}: {failure}"[:MAX_DETAIL]
        is_refused = isinstance(failure, PermissionError) and failure.errno == errno.EPERM
        if is_refused and not limits.isolate and not limits.allow_processes:
            detail += "; a job that starts a process needs reward.allow_processes = true"
        return json.dumps({"failure": kind, "detail": detail}).encode()


def _plain(value: object) -> object:
    """Converts dataclasses to dicts, and numbers of any library to floats."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return float(value)  # type: ignore[arg-type]


def _run_program(function: Callable[..., Any], arguments: dict[str, Any]) -> int:
    """Runs a program for its output; exit code and threads are treated as for a script."""
    try:
        function(**arguments)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    return code & 0xFF


def write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
