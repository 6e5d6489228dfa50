"""Ranks that a launcher such as torchrun started: they meet in the launcher's store.

The process of rank 0 is the scheduler, and starts a process for its rank. The others publish their
addresses, and each serves its rank to the scheduler over a connection (`runtime.rank_host`). The
store has no authentication, so the token of the connections is a file that only the user can read,
in a folder that all machines share. The launcher detects the end of processes and restarts them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from pentad.core.errors import InfraFailure, Problem, RunError, UserError
from pentad.core.scratch import open_own, remove
from pentad.runtime import wire
from pentad.runtime.local_roles import LocalProcess
from pentad.runtime.rank import Rank
from pentad.runtime.rank_host import JOIN_S, RankHost
from pentad.runtime.role_host import RoleHost, job_of
from pentad.runtime.roles import RoleProcess, RoleSpec, Runtime
from pentad.runtime.signals import handling_signals

SCHEDULER, TOKEN = "pentad/scheduler", "token"
"""Key of rank 0 in the store, and name of the file with the token."""
PATIENCE = timedelta(days=60)
"""How long the others wait for rank 0, which may first read or tokenise the data."""


def shares_store() -> bool:
    """Whether torchrun's agents share their own store with the ranks. The restart count differs
    between agents, so on several machines two starts in that store cannot be told apart."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def num_restarts() -> int:
    """Returns torchrun's restart count if its store survives restarts, with the addresses of dead
    processes; else 0."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if shares_store() else 0


class Meeting:
    """The launcher's store, in which the processes of a start exchange addresses."""

    def __init__(self, rank: Rank, folder: Path) -> None:
        """`folder`: one that all machines share."""
        missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(key)]
        if missing:
            remedy = "start with torchrun, or unset RANK and WORLD_SIZE"
            raise UserError(Problem(missing[0], "is not set, and WORLD_SIZE is", remedy))
        self.rank, self.folder = rank, folder
        self.private: Path | None = None
        """The folder of the token, on rank 0."""
        self.host, self.port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.prefix = f"start-{num_restarts()}-"
        self.store = dist.PrefixStore(
            self.prefix,
            dist.TCPStore(
                self.host,
                self.port,
                rank.world,
                is_master=rank.rank == 0 and not shares_store(),
                timeout=timedelta(seconds=JOIN_S),
                wait_for_workers=False,
            ),
        )

    def open(self, token: str, pins: str) -> None:
        """Called by rank 0: lets the others read its token, and its `pins`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.private = Path(tempfile.mkdtemp(prefix=".meeting-", dir=self.folder))
        (self.private / TOKEN).write_text(token)
        self.store.set(SCHEDULER, json.dumps({"folder": self.private.name, "pins": pins}))

    def address(self, rank: int) -> tuple[str, int]:
        """Returns the address of another rank, in order: the last one ends the meeting."""
        try:
            host, port = json.loads(self.store.get(f"pentad/{rank}"))
        except RuntimeError as error:
            self.close()
            raise InfraFailure(f"it did not come within {JOIN_S:g} s") from error
        if rank == self.rank.world - 1:
            self.close()
        return host, port

    def close(self) -> None:
        """Removes the token: the ranks have read it."""
        private, self.private = self.private, None
        if private is not None:
            remove(private)

    def _token(self, private: str) -> str:
        try:
            with os.fdopen(open_own(self.folder / Path(private).name / TOKEN)) as file:
                return file.read()
        except OSError as error:
            rule = f"does not have the folder that rank 0 made in it ({error.strerror})"
            remedy = "set fileroot to a folder that all machines share"
            raise UserError(Problem(f"fileroot = {self.folder}", rule, remedy)) from error

    def serve(self, spec: RoleSpec, pins: str) -> None:
        """Called by the other ranks: serves the rank until the scheduler has ended it. `pins`: the
        commits of its names of the hub."""
        try:
            self.store.wait([SCHEDULER], PATIENCE)
            found = json.loads(self.store.get(SCHEDULER))
        except RuntimeError as error:  # the store ends with rank 0
            raise RunError("connection closed: rank 0 ended") from error
        if found["pins"] != pins:
            rule = f"ranks found different commits on the hub: {found['pins']} and {pins}"
            raise UserError(Problem("actor.path", rule, "name one: OWNER/NAME@COMMIT"))
        with socket.create_connection((self.host, self.port)) as route:
            host, family = route.getsockname()[0], route.family
        sock = socket.create_server((host, 0), family=family)
        sock.setblocking(False)
        role = RoleHost(job_of(spec, self._token(found["folder"])), sock)
        self.store.set(f"pentad/{self.rank.rank}", json.dumps(sock.getsockname()[:2]))
        asyncio.run(_serve_role(role))
        hosted = role.making.result() if role.making else None
        if not (isinstance(hosted, RankHost) and hosted.has_ended):
            raise RunError("connection closed: rank 0 ended")


async def _serve_role(role: RoleHost) -> None:
    """Serves until rank 0 closes the connections. A signal that stops a run ends it only before the
    first of them. Later only rank 0 handles signals: handled by all, they would end some ranks
    during a call."""
    loop, serving = asyncio.get_running_loop(), asyncio.ensure_future(role.run(JOIN_S))
    names: list[str] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not role.listener.had_any.is_set():
            names.append(signal.Signals(number).name)
            loop.call_soon_threadsafe(serving.cancel)

    with handling_signals(stop):
        try:
            await serving
        except asyncio.CancelledError:
            raise RunError(f"stopped by {names[0]} before rank 0 connected") from None


class LaunchedProcess(RoleProcess):
    """The process of a rank that the launcher started and monitors. It exits when its connections
    close."""

    def __init__(self, spec: RoleSpec, token: str, address: tuple[str, int]) -> None:
        super().__init__(spec, token)
        self.address = address
        self.asking: asyncio.Task[None] | None = None

    def ended(self) -> None:
        return None

    def end(self) -> None:
        """Does nothing: the closed connections end it."""

    def stacks(self) -> None:
        self.asking = asyncio.create_task(self._stacks())

    async def _stacks(self) -> None:
        with suppress(InfraFailure):  # it is stopped, or its machine is lost
            asked = await wire.connect(self.name, self.address, self.token, self.generation)
            try:
                await asked.call("stacks")
            finally:
                await asked.close()


class LaunchedRuntime(Runtime):
    """Starts the process of rank 0 on this machine; the others already run."""

    needs_end = True

    def __init__(self, meeting: Meeting, pins: str, *, is_spread: bool) -> None:
        """`pins`: the commits of the scheduler's names of the hub; `is_spread`: whether ranks or
        samplers may be on several machines."""
        super().__init__()
        self.meeting, self.pins, self.is_spread = meeting, pins, is_spread
        self.rendezvous = {"host": meeting.host, "port": meeting.port, "prefix": meeting.prefix}

    async def _start(self, spec: RoleSpec) -> RoleProcess:
        rank = spec.payload["rank"]
        if rank == 0:
            self.meeting.open(self.token, self.pins)
            return LocalProcess(spec, self.token)
        address = await asyncio.to_thread(self.meeting.address, rank)
        return LaunchedProcess(spec, self.token, address)
