"""`verifiers:ID`: an environment of the package verifiers, run in a separate process.

It is an agent whose program runs in that process: the process receives the address of an episode,
calls the policy there, and returns the rewards of its rubric. The proxy at that address records the
tokens, as for any agent.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import Mapping
from typing import Any

from pentad.core.errors import InfraFailure, Problem, UserError
from pentad.data.section import VERIFIERS
from pentad.data.verifiers_rows import LOAD_TIMEOUT_S, command_of, environment_of, problem
from pentad.rollout.agents import AgentWorkflow
from pentad.rollout.hosted import EnvironmentDied, read_value
from pentad.runtime.process import Child, bound
from pentad.runtime.wire import Connection


class VerifiersProcess:
    """The environment's process, restarted if it ended, and the connection to it."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.where = f"rollout.workflow = {spec}"
        self.child: Child | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.connection: Connection | None = None
        self.connecting = asyncio.Lock()
        self.socket: socket.socket | None = self.start()

    def start(self) -> socket.socket:
        """Starts a process that loads the environment, and returns our end of the connection.
        Raises UserError."""
        command = command_of(self.spec, self.where)
        environment = environment_of(command)
        self.child, ours = Child.connected(bound(command), environment=environment)
        weakref.finalize(self, self.child.end)
        said = read_value(ours, self.where, LOAD_TIMEOUT_S)
        if "error" in said:
            self.close()
            raise UserError(problem(self.where, said["error"]))
        return ours

    async def play(self, fields: Mapping[str, Any], base_url: str, api_key: str, model: str) -> Any:
        """The agent program: runs one episode. Returns rewards by name; None without rewards."""
        if VERIFIERS not in fields:
            rule = f"a row has no column {VERIFIERS!r}, which is the task"
            remedy = f"give train_dataset.path: {self.spec}, or leave it out"
            raise UserError(Problem(self.where, rule, remedy))
        connection = await self._connected()
        asked = {"task": fields[VERIFIERS], "base_url": base_url, "api_key": api_key}
        try:
            said = await connection.call("play", **asked, model=model)
        except InfraFailure as error:
            raise EnvironmentDied(f"the process of {self.spec} ended") from error
        if "error" in said:
            raise RuntimeError(f"{self.spec}: {said['error']}")
        return said["rewards"] or None

    async def _connected(self) -> Connection:
        """Returns the connection for the calling event loop; replaces a process that has ended."""
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            self.loop, self.connecting, self.connection = loop, asyncio.Lock(), None
        async with self.connecting:
            if self.connection is None or self.connection.lost.done():
                ours = await asyncio.to_thread(self._take)
                streams = await asyncio.open_unix_connection(sock=ours)
                self.connection = Connection(self.where, *streams, generation=0)
            return self.connection

    def _take(self) -> socket.socket:
        """Returns the socket of the process; starts a new process if it has ended."""
        ours, self.socket = self.socket, None
        if ours is None or self.child is None or not self.child.is_running:
            if ours is not None:
                ours.close()
            self.close()
            ours = self.start()
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.end()


class VerifiersWorkflow(AgentWorkflow):
    def __init__(self, spec: str) -> None:
        self.process = VerifiersProcess(spec)
        super().__init__(self.process.play)

    def close(self) -> None:
        self.process.close()
