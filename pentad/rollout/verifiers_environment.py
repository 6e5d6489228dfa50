"""`verifiers:ID`: an environment of the package verifiers, run in a separate process.

It is an agent whose program runs elsewhere: the process receives the address of an episode, calls
the policy there as a server, and answers with the rewards of its rubric. Tokens are recorded at the
address, as for any agent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import weakref
from collections.abc import Mapping
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.data.section import VERIFIERS
from pentad.data.verifiers_rows import LOAD_TIMEOUT_S, command_of, environment_of, problem
from pentad.rollout.agents import AgentWorkflow
from pentad.rollout.hosted import EnvironmentDied, read_line
from pentad.runtime.process import Child, bound

MAX_LINE = 16 << 20


class VerifiersProcess:
    """The process, restarted if it ended, and the pending answers."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.where = f"rollout.workflow = {spec}"
        self.child: Child | None = None
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.numbers = itertools.count()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.reading: asyncio.Task[None] | None = None
        self.connecting = asyncio.Lock()
        self.socket: socket.socket | None = self.start()

    def start(self) -> socket.socket:
        """Starts a process that has loaded the environment, and returns the run's end of its
        connection. Raises UserError."""
        ours, theirs = socket.socketpair()
        command = command_of(self.spec, self.where, str(theirs.fileno()))
        with theirs:
            self.child = Child.start(
                bound(command), environment=environment_of(command), pass_fds=(theirs.fileno(),)
            )
        weakref.finalize(self, self.child.end)
        ours.settimeout(LOAD_TIMEOUT_S)
        said = read_line(ours, self.where)
        if "error" in said:
            self.close()
            raise UserError(problem(self.where, said["error"]))
        return ours

    async def play(self, fields: Mapping[str, Any], base_url: str, api_key: str, model: str) -> Any:
        """The agent program: runs one episode. Returns rewards by name; None if it has none."""
        if VERIFIERS not in fields:
            rule = f"a row has no column {VERIFIERS!r}, which is the task"
            remedy = f"give train_dataset.path: {self.spec}, or leave it out"
            raise UserError(Problem(self.where, rule, remedy))
        await self._connect()
        assert self.writer is not None, "it is connected"
        number = next(self.numbers)
        self.waiting[number] = asyncio.get_running_loop().create_future()
        asked = {"number": number, "task": fields[VERIFIERS], "base_url": base_url}
        self._say({**asked, "api_key": api_key, "model": model})
        try:
            said = await self.waiting[number]
        except asyncio.CancelledError:
            self._say({"cancel": number})
            raise
        finally:
            del self.waiting[number]
        if "error" in said:
            raise RuntimeError(f"{self.spec}: {said['error']}")
        return said["rewards"] or None

    def _say(self, what: Mapping[str, Any]) -> None:
        assert self.writer is not None, "it is connected"
        self.writer.write(json.dumps(what).encode() + b"\n")

    async def _connect(self) -> None:
        """Connects on the calling event loop; a process that has ended is replaced."""
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            self.loop, self.connecting, self.reading = loop, asyncio.Lock(), None
        async with self.connecting:
            if self.reading is None or self.reading.done():
                ours = await asyncio.to_thread(self._take)
                reader, self.writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE)
                self.reading = asyncio.create_task(self._read(reader))

    def _take(self) -> socket.socket:
        """Handles the end of the current process; that of an earlier one is ignored."""
        ours, self.socket = self.socket, None
        if ours is None or self.child is None or not self.child.is_running:
            if ours is not None:
                ours.close()
            self.close()
            ours = self.start()
        ours.setblocking(False)
        return ours

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                said = json.loads(line)
                answer = self.waiting.get(said["number"])
                if answer is not None and not answer.done():
                    answer.set_result(said)
        finally:
            for answer in self.waiting.values():
                if not answer.done() and not answer.get_loop().is_closed():
                    answer.set_exception(EnvironmentDied(f"the process of {self.spec} ended"))

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
