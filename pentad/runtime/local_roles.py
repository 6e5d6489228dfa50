"""Role processes on this machine: each in a separate session, killed when its parent ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from pentad.runtime.environment import visible_devices
from pentad.runtime.helper import Descriptor
from pentad.runtime.process import Child
from pentad.runtime.role_host import job_of
from pentad.runtime.roles import RoleProcess, RoleSpec, Runtime
from pentad.runtime.standby import StandbyPool, Waiting

COMMAND = [sys.executable, "-m", "pentad.runtime.role_host"]
OF_A_RANK = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class LocalProcess(RoleProcess):
    """A role process on this machine, and its port."""

    def __init__(
        self,
        spec: RoleSpec,
        token: str,
        standbys: StandbyPool | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """Listens at `host`."""
        super().__init__(spec, token)
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with socket.create_server((host, 0)) as listening:
            self.address = listening.getsockname()[:2]
            fd = Descriptor(listening.fileno())
            job = job_of(spec, token, standing_in=own_environment(spec), listen_fd=fd)
            taken = None if standbys is None else standbys.take(job)
            self.process = taken or self._start(spec, job)
        if spec.cores:
            os.sched_setaffinity(self.process.pid, spec.cores)

    def _start(self, spec: RoleSpec, job: dict[str, Any]) -> Child:
        words = [*COMMAND, spec.name]  # readable name in process listings
        waiting = Waiting.start(words, environment_of(spec), log=spec.log)
        waiting.take(job)
        return waiting.process

    @property
    def is_stopped(self) -> bool:
        return self.process.is_stopped

    def ended(self) -> str | None:
        return self.process.ended()

    def end(self) -> None:
        self.process.end()

    def stacks(self) -> None:
        self.process.send(signal.SIGUSR1)


class LocalRuntime(Runtime):
    """Starts role processes on this machine."""

    def __init__(self, standbys: StandbyPool | None = None) -> None:
        """`standbys`: used in place of new processes."""
        super().__init__()
        self.standbys = standbys

    async def _start(self, spec: RoleSpec) -> LocalProcess:
        return LocalProcess(spec, self.token, self.standbys)


def environment_of(spec: RoleSpec) -> dict[str, str]:
    """Returns our environment without the variables of a rank, with only the spec's GPUs and
    unbuffered output."""
    ours = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    return {**ours, "PYTHONUNBUFFERED": "1", **own_environment(spec)}


def own_environment(spec: RoleSpec) -> dict[str, str]:
    """Returns the environment variables specific to a process of this spec."""
    return {"CUDA_VISIBLE_DEVICES": visible_devices(spec.devices), **spec.environment}
