"""Roles of a run as processes: what one is started with, and what a runtime promises.

A runtime starts processes that run `role_host`, on this machine or elsewhere. Whoever asked for one
connects to it, and ends it with its runtime.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pentad.core.errors import InfraFailure
from pentad.runtime import wire
from pentad.runtime.report import tail

BEAT_S = 0.5
"""How often a role process shows that it runs, with its stats."""
PATIENCE_S = 30.0
"""Silence after which a role process counts as hanging."""
CONNECT_S = 120.0
"""How long a process may take to start before it answers."""
EXIT_WAIT_S = 2.0
"""A process that does not answer any more is waited for so long: how it ended says more."""
POLL_S = 0.05
LOG_LINES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One process of a run. Example: RoleSpec(name="rollout-0", target="pkg.module:build", ...)."""

    name: str
    """Of the role and its number, such as rollout-0."""
    target: str
    """The function "module:function" that makes what is served, called as target(payload, emit)."""
    payload: Any
    """A JSON value."""
    log: Path
    """What it prints is appended here."""
    generation: int = 0
    """Counts the starts of this role: what an earlier process of it says is refused."""
    num_gpus: float = 0
    devices: tuple[int, ...] = ()
    """GPUs by the numbers this process has for them; a runtime that places by itself takes
    `num_gpus`."""
    beat_s: float = BEAT_S
    """How often it shows that it runs."""
    cores: tuple[int, ...] = ()
    """CPU cores it is kept on; none given: any."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set over the inherited ones."""
    seed: int = 0
    """Of the run: the random numbers that code of this process draws follow from it and `name`."""


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
        """Whether a signal such as SIGSTOP halted it, as far as that can be seen from here."""
        return False

    @abstractmethod
    def ended(self) -> str | None:
        """How it ended, in words; None while it runs."""

    def poll(self) -> str | None:
        """The same, with the last lines of its log."""
        if (ended := self.ended()) is None:
            return None
        lines = " | ".join(tail(self.log, LOG_LINES))
        return ended + (f"; the last lines of {self.log}: {lines}" if lines else "")

    def kill(self) -> None:
        """Ends it and everything it started, at once; returns when it is gone."""
        if not self.has_ended:
            self.has_ended = True
            self.end()

    @abstractmethod
    def end(self) -> None:
        """Once, by `kill`."""

    @abstractmethod
    def stacks(self) -> None:
        """Has it write the stacks of its threads to its log."""


class Runtime(Protocol):
    """Starts processes; `close` ends every one it started."""

    is_spread: bool
    """Whether they may be on other machines."""

    async def start(self, spec: RoleSpec) -> RoleProcess: ...

    def lacks(self, name: str) -> str | None:
        """Why there is no place for a process of this name at present; None where there is."""
        ...

    def lost(self) -> str | None:
        """Why no process can be started or watched any more; None while that is not so."""
        ...

    async def close(self) -> None: ...


async def connect(
    process: RoleProcess,
    on_event: wire.OnEvent | None = None,
    *,
    patience_s: float | None = PATIENCE_S,
    timeout_s: float = CONNECT_S,
) -> wire.Connection:
    """A connection to the process, as soon as it answers. Raises InfraFailure if it ends first.
    `patience_s` None: whoever asked watches its silence."""
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
