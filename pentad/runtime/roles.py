"""Roles of a run as processes: their specs and the interface of runtimes.

A runtime starts processes that run `role_host`, on this machine or elsewhere. The caller connects
to them, and ends them with the runtime.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentad.core.errors import InfraFailure
from pentad.runtime import wire
from pentad.runtime.report import with_tail

BEAT_S = 0.5
"""Interval of a role process's heartbeat, with its stats."""
PATIENCE_S = 30.0
"""Seconds without a message after which a role process counts as hung."""
CONNECT_S = 120.0
"""Time limit for a process to start and respond, in seconds."""
EXIT_WAIT_S = 2.0
"""Time to wait for the exit of a process that stopped responding: its exit is more informative."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One process of a run. Example: RoleSpec(name="rollout-0", target="pkg.module:build", ...)."""

    name: str
    """Role and number, such as rollout-0."""
    target: str
    """"module:function" of the function that makes the served object: target(payload, emit)."""
    payload: Any
    """A JSON value."""
    log: Path
    """File to which its output is appended."""
    generation: int = 0
    """Number of starts of this role before this one; messages of earlier processes are rejected."""
    num_gpus: float = 0
    devices: tuple[int, ...] = ()
    """GPUs by this process's numbering; a runtime that places processes itself uses `num_gpus`."""
    beat_s: float = BEAT_S
    """Interval of its heartbeat."""
    cores: tuple[int, ...] = ()
    """CPU cores it is bound to; empty: any."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that override the inherited ones."""
    seed: int = 0
    """The seed of the run: random numbers of user code in this process depend on it and on
    `name`."""


class RoleProcess(ABC):
    """A process that was started for a spec."""

    address: tuple[str, int]

    def __init__(self, spec: RoleSpec, token: str) -> None:
        self.name = spec.name
        self.generation = spec.generation
        self.token = token
        self.log = spec.log
        self.has_ended = False

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP stopped it, as far as known."""
        return False

    @abstractmethod
    def ended(self) -> str | None:
        """Describes how it ended; None while it runs."""

    def poll(self) -> str | None:
        """Describes how it ended, with the last lines of its log."""
        return None if (ended := self.ended()) is None else with_tail(ended, self.log)

    def kill(self) -> None:
        """Kills it and all processes it started; returns when it is gone."""
        if not self.has_ended:
            self.has_ended = True
            self.end()

    @abstractmethod
    def end(self) -> None:
        """Ends the process; called once, by `kill`."""

    def stacks(self) -> None:  # noqa: B027
        """Makes it write the stacks of its threads to its log, if it is a rank."""


class Runtime(ABC):
    """Starts processes, with one token for all of them; `close` ends every one it started."""

    is_spread: bool = False
    """Whether processes may be on other machines."""
    needs_end: bool = False
    """Whether ranks fail that are not called to `end`, also if no other call was made."""
    rendezvous: Mapping[str, Any] | None = None
    """The address at which ranks meet (`RankHost.join`); None: rank 0 opens one."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(32)
        self.processes: list[RoleProcess] = []

    async def start(self, spec: RoleSpec) -> RoleProcess:
        process = await self._start(spec)
        self.processes = [one for one in self.processes if not one.has_ended]
        self.processes.append(process)  # from any thread
        return process

    @abstractmethod
    async def _start(self, spec: RoleSpec) -> RoleProcess:
        """Raises InfraFailure if it cannot be started."""

    def why_unavailable(self, name: str) -> str | None:
        """Returns why no process of this name can be placed now; None if one can."""
        return None

    def lost(self) -> str | None:
        """Why no process can be started or monitored any more; None if it can."""
        return None

    async def close(self) -> None:
        for process in self.processes:
            process.kill()


async def connect(
    process: RoleProcess,
    on_event: wire.OnEvent | None = None,
    *,
    patience_s: float | None = PATIENCE_S,
    timeout_s: float = CONNECT_S,
) -> wire.Connection:
    """Connects to the process as soon as it responds. InfraFailure if it ends first. `patience_s`
    None: the caller monitors the heartbeat."""
    joining = asyncio.ensure_future(
        wire.connect(
            process.name,
            process.address,
            process.token,
            process.generation,
            on_event=on_event,
            patience_s=patience_s,
            timeout_s=timeout_s,
        )
    )
    ending = asyncio.ensure_future(_wait_ended(process))
    try:
        await asyncio.wait([joining, ending], return_when=asyncio.FIRST_COMPLETED)
        if joining.done() and joining.exception() is not None:
            await asyncio.wait([ending], timeout=EXIT_WAIT_S)
        if ending.done():
            raise InfraFailure(f"{process.name} {ending.result()}")
        return joining.result()
    finally:
        joining.cancel()
        ending.cancel()


async def _wait_ended(process: RoleProcess) -> str:
    while (ended := process.poll()) is None:
        await asyncio.sleep(POLL_S)
    return ended
