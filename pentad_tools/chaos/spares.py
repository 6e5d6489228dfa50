"""Spare processes: forks of a program with all imports done, created while it has no threads.

A fork takes milliseconds, while the imports of a new process take seconds. Spares are created
before every run under test; each waits to become the process of a role, in place of one that
`runtime.local_roles` would start.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pentad.runtime.local_roles import LocalProcess, own_environment
from pentad.runtime.process import FAILED, Child, die_with_parent
from pentad.runtime.role_host import job_of, run_job
from pentad.runtime.roles import RoleSpec
from pentad.runtime.standby import stand_in


@dataclass(slots=True)
class Fork:
    """The part of the `Popen` interface that `Child` needs."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.code = os.waitstatus_to_exitcode(found[1])
        return self.code

    def wait(self) -> int:
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code


@dataclass(frozen=True, slots=True)
class Spare:
    process: Child
    address: tuple[str, int]
    pipe: int
    """It reads its job there."""


SPARES: list[Spare] = []
start_cold = LocalProcess._start


def start(self: LocalProcess, spec: RoleSpec) -> None:
    """Starts the role in a spare, or in a new process if no spare is left."""
    job = job_of(spec, self.token, standing_in=own_environment(spec))
    if (taken := take_spare(job)) is None:
        start_cold(self, spec)
    else:
        self.process, self.address = taken


def make_spares(count: int) -> None:
    """Forks spares for roles; call it in the main thread, before other threads exist."""
    LocalProcess._start = start  # type: ignore[method-assign]
    sys.stdout.flush(), sys.stderr.flush()
    for _ in range(count):
        with socket.create_server(("127.0.0.1", 0)) as listening:
            reads, writes = os.pipe()
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                _be_spare(parent, reads, writes, listening)
            os.close(reads)
            address = listening.getsockname()[:2]
            SPARES.append(Spare(Child(Fork(pid)), address, writes))


def take_spare(job: Mapping[str, Any]) -> tuple[Child, tuple[str, int]] | None:
    """Assigns the job to a spare; returns its process and address, or None if no spare is left."""
    while SPARES:
        spare = SPARES.pop(0)
        try:
            with os.fdopen(spare.pipe, "wb") as pipe:
                pipe.write(json.dumps(job).encode())
        except BrokenPipeError:
            spare.process.end()
            continue
        return spare.process, spare.address
    return None


def _be_spare(parent: int, reads: int, writes: int, listening: socket.socket) -> NoReturn:
    code = FAILED
    try:
        os.setsid()
        die_with_parent(parent)
        for others in (writes, *(one.pipe for one in SPARES)):
            os.close(others)
        SPARES.clear()
        with os.fdopen(reads, "rb") as pipe:
            job = json.loads(pipe.read() or b"null")
        code = 0
        if job is not None:
            code = run_job(stand_in(job) | {"listen_fd": listening.fileno()})
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
