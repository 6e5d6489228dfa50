"""Spare processes: forks of a program with all imports done, created while it has no threads.

A fork takes milliseconds, while the imports of a new process take seconds. Spares are created
before every run under test; each waits to become the process of a role, in place of one that
`runtime.local_roles` would start.
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

from pentad.runtime.helper import Channel
from pentad.runtime.local_roles import LocalProcess
from pentad.runtime.process import FAILED, Child, die_with_parent
from pentad.runtime.role_host import run_job
from pentad.runtime.roles import RoleSpec
from pentad.runtime.standby import Waiting, receive_job, stand_in


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


SPARES: list[Waiting] = []
start_cold = LocalProcess._start


def start(self: LocalProcess, spec: RoleSpec, job: dict[str, Any]) -> Child:
    """Starts the role in a spare, or in a new process if no spare is left."""
    while SPARES:
        if (process := SPARES.pop(0).take(job)) is not None:
            return process
    return start_cold(self, spec, job)


def make_spares(count: int) -> None:
    """Forks spares for roles; call it in the main thread, before other threads exist."""
    LocalProcess._start = start  # type: ignore[method-assign]
    sys.stdout.flush(), sys.stderr.flush()
    for _ in range(count):
        ours, theirs = socket.socketpair()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            ours.close()
            _be_spare(parent, Channel(theirs))
        theirs.close()
        SPARES.append(Waiting(Child(Fork(pid)), Channel(ours)))


def _be_spare(parent: int, channel: Channel) -> NoReturn:
    code = FAILED
    try:
        os.setsid()
        die_with_parent(parent)
        for other in SPARES:
            other.channel.sock.close()
        SPARES.clear()
        code = run_job(stand_in(receive_job(channel)))
    except SystemExit:
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
