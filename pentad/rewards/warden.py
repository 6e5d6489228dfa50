"""The worker process of the reward pool: starts each job as a fork, enforces its limits and reads
its result.

Started by `sandbox.py`, whose calls it answers as the other end of a `runtime.wire.Connection`. It
has no event loop and imports only the standard library and files of ours that need no other. A
job's arguments arrive pickled from the parent; its result is returned as bytes that are never
unpickled. Jobs are forked from a separate process (`origin.py`), which never receives these data.
When the parent ends, the warden ends its job and exits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pickle
import select
import signal
import socket
import sys
import time
from typing import Any

from pentad.rewards import confine, origin
from pentad.runtime.frames import receive, send

PARENT_CHECK_S = 1.0
PROCESS_CHECK_S = 0.02
MEMORY_CHECK_S = 0.01
"""Interval of measuring page tables, which no limit of the kernel covers."""


@dataclasses.dataclass(slots=True)
class Ended:
    """How a job ended: its output, or the kind of its failure."""

    failure: str | None
    detail: str = ""
    body: bytes = b""


CANCELLED = Ended("cancelled", "its caller no longer waits")


class Warden:
    """Runs one job at a time, each until all its processes have ended."""

    def __init__(
        self,
        limits: confine.Limits,
        control: socket.socket,
        source: socket.socket,
        source_pid: int,
    ) -> None:
        self.limits = limits
        self.control = control
        self.source, self.source_pid = source, source_pid
        """The process that forks jobs."""
        self.parent = os.getppid()
        os.dup2(2, 1)
        confine.adopt_orphans()

    def serve(self) -> None:
        """Answers calls until the parent has closed its end or has ended. An event is the end of a
        job that is over by now."""
        while (items := self._next_items()) is not None:
            for number, item in enumerate(items):
                if "call" in item:
                    if len(items) > number + 1:  # one call at a time: its cancellation follows
                        ended = CANCELLED
                    else:
                        ended = getattr(self, item["method"])(**item["arguments"])
                    value = {"failure": ended.failure, "detail": ended.detail, "body": ended.body}
                    send(self.control, {"answer": item["call"], "value": value})

    def hello(self, bait: dict[str, Any]) -> Ended:
        """Tests the protections, and reports them with the result of the imports."""
        said = json.loads(self._from_source())
        job = {"spec": f"{origin.__name__}:probe", "timeout_s": 20.0, "capture": "result"}
        given = {"limits": dataclasses.asdict(self.limits), "target": bait}
        tried = self.run(job, pickle.dumps(given))
        found = {"detail": tried.detail} if tried.failure else json.loads(tried.body)
        said["missing"] = found["value"] if "value" in found else [found["detail"]]
        return Ended(None, body=json.dumps(said).encode())

    def _next_items(self) -> list[dict[str, Any]] | None:
        while not select.select([self.control], [], [], PARENT_CHECK_S)[0]:
            if os.getppid() != self.parent:
                return None
        try:
            return receive(self.control)
        except (EOFError, ConnectionError):
            return None

    def _from_source(self) -> bytes:
        message = self.source.recv(origin.MESSAGE_BYTES)
        if not message:
            raise EOFError("the process that jobs are forked from has ended")
        return message

    def run(self, job: dict[str, Any], body: bytes) -> Ended:
        num_before = self._num_processes()
        read_end = self._start(job, body)
        _, [watch], _, _ = socket.recv_fds(self.source, origin.MESSAGE_BYTES, 1)
        try:
            ended = self._watch(job, watch, read_end, num_before)
        finally:
            self.source.sendall(origin.OVER)
            status = json.loads(self._from_source())
            os.close(watch)
            os.close(read_end)
        return _judge(ended, status, job["capture"])

    def _start(self, job: dict[str, Any], body: bytes) -> int:
        """Starts a job, with its arguments in a file that only the job reads; returns the pipe of
        its result."""
        given = os.memfd_create("arguments")
        origin.write(given, body)
        os.lseek(given, 0, os.SEEK_SET)
        read_end, write_end = os.pipe()
        wanted = {name: job[name] for name in ("spec", "timeout_s", "capture")}
        socket.send_fds(self.source, [json.dumps(wanted).encode()], [given, write_end])
        os.close(given)
        os.close(write_end)
        return read_end

    def _num_processes(self) -> int:
        """Returns the number of processes at and below the source, if jobs may start some."""
        return len(confine.descendants(self.source_pid)) if self.limits.allow_processes else 0

    def _watch(self, job: dict[str, Any], watch: int, pipe: int, num_before: int) -> Ended:
        """Reads the job's output until it ends or exceeds a limit."""
        deadline = time.monotonic() + job["timeout_s"]
        check_s = PROCESS_CHECK_S if self.limits.allow_processes else MEMORY_CHECK_S
        max_tables = self.limits.max_memory_bytes // confine.PAGE_TABLE_SHARE
        written = bytearray()
        poll = select.poll()
        control = self.control.fileno()
        for descriptor in (watch, pipe, control):
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
            if control in ready or os.getppid() != self.parent:
                return CANCELLED
            if confine.page_table_bytes(watch) > max_tables:
                return Ended("memory", f"more than {max_tables} bytes of page tables")
            if self.limits.allow_processes:
                num = self._num_processes() - num_before
                if num > self.limits.max_processes:
                    return Ended("processes", f"{num} processes at once")


def _drain(pipe: int, written: bytearray) -> bool:
    """Reads available bytes, up to a limit; False if no writer is left."""
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
    """Returns the result of a job that ended by itself; others already have one."""
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
    config, control = json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[-2]))
    control.set_inheritable(False)
    limits = confine.Limits(**config["limits"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source_pid = os.fork()  # before this process has data that jobs must not read
    if source_pid == 0:
        confine.resume_after_parent()
        ours.close()
        control.close()
        source = origin.Origin(limits, config["folder"], theirs)
        source.hello(config["preload"])
        source.serve()
        return
    theirs.close()
    warden = Warden(limits, control, ours, source_pid)
    try:
        with contextlib.suppress(BrokenPipeError):  # the parent has ended
            warden.serve()
    finally:
        confine.end_all(os.getpid())
