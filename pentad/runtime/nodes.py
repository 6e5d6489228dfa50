"""Role processes on the machines of a Slurm job: an agent on each machine starts them there.

`python -m pentad.runtime.nodes N` is the agent of machine N, which the job's script starts if the
placement has a process there that torchrun does not start. It writes its address to the folder
PENTAD_NODES, accepts callers with the token of the job, and ends with its Slurm step.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pentad.core.errors import InfraFailure, RunError
from pentad.core.files import write_atomic
from pentad.runtime import wire
from pentad.runtime.local_roles import LocalProcess
from pentad.runtime.roles import CONNECT_S, RoleProcess, RoleSpec, Runtime

NODES = "PENTAD_NODES"
TOKEN = "PENTAD_NODES_TOKEN"
POLL_S = 0.2
ANY_INTERFACE = "0.0.0.0"  # noqa: S104 (who does not know the token is rejected)


class Agent:
    """Starts, monitors and ends role processes of one machine."""

    def __init__(self) -> None:
        self.processes: dict[str, LocalProcess] = {}

    async def serve(self, method: str, arguments: dict[str, Any]) -> Any:
        if method not in ("start", "poll", "kill"):
            raise RunError(f"an agent has no method {method}")
        return await getattr(self, method)(**arguments)

    async def start(self, spec: dict[str, Any], token: str) -> dict[str, Any]:
        """Starts a process; an earlier process of its name has ended when this returns."""
        await self.kill(spec["name"])
        given: dict[str, Any] = dict(spec)
        for name in ("devices", "cores"):
            given[name] = tuple(given[name])
        made = RoleSpec(**given | {"log": Path(given["log"])})
        self.processes[made.name] = LocalProcess(made, token, host=ANY_INTERFACE)
        return {"port": self.processes[made.name].address[1]}

    async def poll(self, name: str) -> dict[str, str | None]:
        return {"ended": self.processes[name].ended()}

    async def kill(self, name: str) -> None:
        if (process := self.processes.pop(name, None)) is not None:
            await asyncio.to_thread(process.kill)


async def run_agent(node: int, folder: Path, token: str) -> None:
    """Serves until SIGTERM."""
    agent, stopped = Agent(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    sock = socket.create_server((ANY_INTERFACE, 0))
    listener = wire.Listener(sock, token, 0, agent.serve)
    await listener.open()
    folder.mkdir(parents=True, exist_ok=True)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    said = json.dumps({"host": host, "port": sock.getsockname()[1]})
    write_atomic(folder / f"{node}.json", said.encode(), is_durable=False)
    await stopped.wait()
    for name in list(agent.processes):
        await agent.kill(name)
    await listener.close()


class NodeProcess(RoleProcess):
    """A role process that an agent started."""

    def __init__(
        self,
        spec: RoleSpec,
        token: str,
        agent: wire.Connection,
        address: tuple[str, int],
        asking: list[asyncio.Task[None]],
    ) -> None:
        """`asking`: tasks of requests to the agent; its runtime waits for them."""
        super().__init__(spec, token)
        self.asking = asking
        self.agent = agent
        self.address = address
        self.how: str | None = None
        self.watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while self.how is None:
            try:
                self.how = (await self.agent.call("poll", name=self.name))["ended"]
            except (InfraFailure, RunError) as error:
                self.how = f"is out of reach: {error}"
            await asyncio.sleep(POLL_S)

    def ended(self) -> str | None:
        return self.how

    def end(self) -> None:
        """Ends it through the agent; the next process of this name starts after that."""
        self.watching.cancel()
        self.how = self.how or "was ended"
        self.asking.append(asyncio.create_task(self._kill()))

    async def _kill(self) -> None:
        if not self.agent.lost.done():  # else its processes end with the connection
            await self.agent.call("kill", name=self.name)


class NodeRuntime(Runtime):
    """Starts role processes on the job's machines according to the placement."""

    is_spread = True

    def __init__(self, places: Mapping[str, int]) -> None:
        """`places`: the machine of each process by name; 0 is this one."""
        super().__init__()
        self.places = places
        self.folder, self.job_token = Path(os.environ[NODES]), os.environ[TOKEN]
        self.agents: dict[int, tuple[wire.Connection, str]] = {}
        self.connecting = asyncio.Lock()
        self.endings: list[asyncio.Task[None]] = []

    async def _start(self, spec: RoleSpec) -> RoleProcess:
        node = self.places[spec.name]
        if node == 0:
            return LocalProcess(spec, self.token)
        agent, host = await self._agent(node)
        given = asdict(spec) | {"log": str(spec.log.absolute())}
        answer = await agent.call("start", spec=given, token=self.token)
        return NodeProcess(spec, self.token, agent, (host, answer["port"]), self.endings)

    async def _agent(self, node: int) -> tuple[wire.Connection, str]:
        async with self.connecting:
            known = self.agents.get(node)
            if known is None or known[0].lost.done():
                said = await self._address(node)
                address = said["host"], said["port"]
                agent = await wire.connect(
                    f"the agent of machine {node}", address, self.job_token, 0
                )
                self.agents[node] = agent, said["host"]
            return self.agents[node]

    async def _address(self, node: int) -> dict[str, Any]:
        path, deadline = self.folder / f"{node}.json", time.monotonic() + CONNECT_S
        while not path.is_file():
            if time.monotonic() > deadline:
                raise InfraFailure(f"the agent of machine {node} did not start: there is no {path}")
            await asyncio.sleep(POLL_S)
        said: dict[str, Any] = json.loads(path.read_text())
        return said

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*self.endings, return_exceptions=True)
        for agent, _ in self.agents.values():
            await agent.close()


def main() -> int:
    asyncio.run(run_agent(int(sys.argv[1]), Path(os.environ[NODES]), os.environ[TOKEN]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
