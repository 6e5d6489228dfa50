"""The worker process of the reward pool: runs each job in a child of its own and ends what it left.

Standard library only; started by `sandbox.py`, which speaks to it over two pipes in frames of a
JSON header and raw bytes. A job's arguments come pickled from the parent; what a job says goes
back as bytes that nobody unpickles. The modules of a reward are imported here once, so a job
costs a fork. When the parent is gone the warden ends its job and itself.
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
import select
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from pentad.core.specs import describe, load, settled
from pentad.rewards import breakout, confine, enclosure
from pentad.runtime.scratch import remove

FRAME = struct.Struct(">II")
PARENT_CHECK_S = 1.0
PROCESS_CHECK_S = 0.02
MAX_DETAIL = 1000
CLEANING_S = 2.0
"""For what a job left; the pool removes the rest when it closes."""


@dataclasses.dataclass(slots=True)
class Ended:
    """How a job ended: what it wrote, or the kind of its failure."""

    failure: str | None
    detail: str = ""
    body: bytes = b""


# --- in the child ----------------------------------------------------------------------------


def _be_job(
    job: dict[str, Any], body: bytes, limits: confine.Limits, pipe: int, closing: list[int]
) -> NoReturn:
    """Everything that happens in the process of a job; never returns.

    The first byte says whether the job began: what goes wrong before it is our fault, not its.
    """
    code = 1
    try:
        _arrange_files(pipe, closing, limits.isolate)
        try:
            _prepare(job, limits)
        except BaseException as failure:
            _write(pipe, f"-{type(failure).__name__}: {failure}".encode())
            os._exit(1)
        _write(pipe, b"+")
        if job["capture"] == "stdout":
            os.dup2(pipe, 1)
            code = _run_program(load(job["spec"]), pickle.loads(body))
        else:
            _write(pipe, _result_of(job["spec"], body, limits))
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
        load(job["spec"])  # our own module, which the job itself may not read
    cpu_s = math.ceil(job["timeout_s"]) + 5
    confine.apply(limits, job["scratch"], cpu_s, is_enclosed=job["is_enclosed"])


def probe(limits: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """A job that tries to break out; returns the protections that are missing."""
    return breakout.missing(confine.Limits(**limits), **target)


def _arrange_files(pipe: int, closing: list[int], isolate: bool) -> None:
    """No way back to the warden's own pipes; standard streams lead nowhere."""
    for descriptor in closing:
        os.close(descriptor)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    if isolate:  # an ordinary reward may own files that its module opened
        confine.close_all_but(pipe)
    sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")


def _stream(descriptor: int, mode: str) -> TextIO:
    return cast(TextIO, open(descriptor, mode, closefd=False))  # noqa: PTH123, SIM115


def _result_of(spec: str, body: bytes, limits: confine.Limits) -> bytes:
    try:
        value = settled(load(spec)(**pickle.loads(body)))
        return json.dumps({"value": value}, default=_plain).encode()
    except BaseException as failure:
        kind = "memory" if isinstance(failure, MemoryError) else "error"
        detail = f"{type(failure).__name__}: {failure}"[:MAX_DETAIL]
        is_refused = isinstance(failure, PermissionError) and failure.errno == errno.EPERM
        if is_refused and not limits.isolate and not limits.allow_processes:
            detail += "; if it was to start a process: that needs reward.allow_processes = true"
        return json.dumps({"failure": kind, "detail": detail}).encode()


def _plain(value: object) -> object:
    """Dataclasses as dicts, numbers of any library as floats."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return float(value)  # type: ignore[arg-type]


def _run_program(function: Callable[..., Any], arguments: dict[str, Any]) -> int:
    """What counts is what is printed; exit code and threads are treated as for a script."""
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


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# --- in the warden ---------------------------------------------------------------------------


class Warden:
    """One job at a time, each watched until it is over in every respect."""

    def __init__(self, limits: confine.Limits, folder: str) -> None:
        self.limits = limits
        self.folder = folder
        self.parent = os.getppid()
        self.enclosure: enclosure.Enclosure | None = None
        self.control, self.reply = os.dup(0), os.dup(1)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.dup2(2, 1)  # what a module prints while it is imported goes to the log
        confine.adopt_orphans()

    def serve(self) -> None:
        while (frame := self._next_frame()) is not None:
            header, body = frame
            if header["kind"] == "job":
                self._answer(self._run(header, body))

    def hello(self, preload: list[str], bait: dict[str, Any]) -> None:
        """Imports what rewards need, tries the protections, and says what was found."""
        said: dict[str, Any] = {"described": {}, "errors": {}, "refused": ""}
        for spec in preload:
            try:
                said["described"][spec] = describe(spec)
            except BaseException as failure:
                said["errors"][spec] = f"{type(failure).__name__}: {failure}"[:MAX_DETAIL]
        gc.collect()
        gc.freeze()  # children share these pages instead of copying them
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
        said["address_space_bytes"] = num_pages * os.sysconf("SC_PAGE_SIZE")
        if self.limits.isolate:
            said["refused"] = self._enclose()
        job = {"spec": f"{__name__}:probe", "timeout_s": 20.0, "capture": "result"}
        given = {"limits": dataclasses.asdict(self.limits), "target": bait}
        tried = self._run(job, pickle.dumps(given))
        said["missing"] = json.loads(tried.body)["value"] if not tried.failure else [tried.detail]
        self._answer(Ended(None, body=json.dumps(said).encode()))

    def _enclose(self) -> str:
        """Why this worker has no namespaces of its own, or nothing if it has."""
        try:
            self.enclosure = enclosure.enclose(self.limits)
        except OSError as failure:
            return str(failure)
        self.parent = os.getppid()
        return ""

    def _next_frame(self) -> tuple[dict[str, Any], bytes] | None:
        """None when the parent has closed its end or is gone."""
        while not select.select([self.control], [], [], PARENT_CHECK_S)[0]:
            if os.getppid() != self.parent:
                return None
        lengths = self._read(FRAME.size)
        if len(lengths) < FRAME.size:
            return None
        header, body = map(self._read, FRAME.unpack(lengths))
        return json.loads(header), body

    def _read(self, num: int) -> bytes:
        pieces = bytearray()
        while len(pieces) < num and (piece := os.read(self.control, num - len(pieces))):
            pieces += piece
        return bytes(pieces)

    def _answer(self, ended: Ended) -> None:
        header = json.dumps({"failure": ended.failure, "detail": ended.detail}).encode()
        _write(self.reply, FRAME.pack(len(header), len(ended.body)) + header + ended.body)

    def _run(self, job: dict[str, Any], body: bytes) -> Ended:
        inside = self.enclosure
        job["scratch"] = inside.open_scratch() if inside else tempfile.mkdtemp(dir=self.folder)
        job["is_enclosed"] = inside is not None
        before = confine.descendants(os.getpid()) if self.limits.allow_processes else set()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            _be_job(job, body, self.limits, write_end, [self.control, self.reply, read_end])
        os.close(write_end)
        watch = os.pidfd_open(pid)
        try:
            ended = self._watch(job, watch, read_end, len(before))
        finally:
            signal.pidfd_send_signal(watch, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(watch)
            os.close(read_end)
            if self.limits.allow_processes:
                confine.end_all(os.getpid(), keep=before)
            inside.close_scratch() if inside else remove(job["scratch"], CLEANING_S)
        return _judge(ended, status, job["capture"])

    def _watch(self, job: dict[str, Any], watch: int, pipe: int, num_before: int) -> Ended:
        """Reads what the job writes until it ends or breaks a limit."""
        deadline = time.monotonic() + job["timeout_s"]
        check_s = PROCESS_CHECK_S if self.limits.allow_processes else PARENT_CHECK_S
        written = bytearray()
        poll = select.poll()
        for descriptor in (watch, pipe, self.control):
            poll.register(descriptor, select.POLLIN)
        os.set_blocking(pipe, False)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return Ended("timeout", f"longer than {job['timeout_s']:g} s")
            wait_ms = math.ceil(1000 * min(left_s, check_s))
            ready = {descriptor for descriptor, _ in poll.poll(wait_ms)}
            if (pipe in ready or watch in ready) and not _drain(pipe, written):
                with contextlib.suppress(KeyError):  # closed earlier by the job
                    poll.unregister(pipe)
            if len(written) > self.limits.max_result_bytes + 1:
                return Ended("output", f"more than {self.limits.max_result_bytes} bytes")
            if watch in ready:
                return Ended(None, body=bytes(written))
            if self.control in ready or os.getppid() != self.parent:
                return Ended("cancelled", "nobody waits for it")
            if self.limits.allow_processes:
                num = len(confine.descendants(os.getpid())) - num_before
                if num > self.limits.max_processes:
                    return Ended("processes", f"{num} processes at once")


def _drain(pipe: int, written: bytearray) -> bool:
    """Takes what is there, a bounded amount; False when nobody can write any more."""
    for _ in range(16):
        try:
            piece = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        if not piece:
            return False
        written += piece
    return True


def _judge(ended: Ended, status: int, capture: str) -> Ended:
    """The verdict on a job that ended by itself; others have theirs."""
    if ended.failure is not None:
        return ended
    if ended.body[:1] != b"+":
        detail = ended.body[1:].decode(errors="replace") or "the process ended before its job began"
        return Ended("lost", detail)
    if status < 0:
        known = {number.value: number.name for number in signal.Signals}
        return Ended("crash", known.get(-status, f"signal {-status}"))
    if status > 0:
        return Ended("error" if capture == "stdout" else "crash", f"exit code {status}")
    if capture == "result" and len(ended.body) == 1:
        return Ended("crash", "ended without a result")
    return Ended(None, body=ended.body[1:])


def main() -> None:
    config = json.loads(sys.argv[1])
    warden = Warden(confine.Limits(**config["limits"]), config["folder"])
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        warden.hello(config["preload"], config["bait"])
        warden.serve()
