"""The process of a role: `python -m pentad.runtime.role_host NAME`, which receives its job over a
channel.

It listens before heavy imports, makes the target's object in a thread, and serves the object's
async methods to callers with the token. It sends the object's stats as a heartbeat, and exits with
its parent or when the last connection closes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol

from pentad.core.errors import RunError, UserError
from pentad.core.machine import flush_output
from pentad.core.seeds import seed_globals
from pentad.core.specs import load
from pentad.runtime.process import FAILED
from pentad.runtime.roles import CONNECT_S, RoleSpec
from pentad.runtime.standby import wait_for_job
from pentad.runtime.wire import Listener

log = logging.getLogger(__name__)

FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
"""Format of the log of a role process."""


class Hosted(Protocol):
    """The served object: its public coroutine methods can be called."""

    def stats(self) -> dict[str, float]: ...

    async def close(self) -> None: ...


def job_of(spec: RoleSpec, token: str, **more: Any) -> dict[str, Any]:
    """Returns the job of a spec's process. `more`: its listening socket and variables, if any."""
    return asdict(spec) | {"log": str(spec.log), "token": token, "path": sys.path, **more}


class RoleHost:
    """Serves one object. Listens at once; calls wait until the object is made."""

    def __init__(self, job: Mapping[str, Any], sock: socket.socket) -> None:
        self.job = job
        self.listener = Listener(sock, job["token"], job["generation"], self._serve)
        self.making: asyncio.Future[Hosted] | None = None

    async def run(self, connect_s: float = CONNECT_S) -> int:
        """Runs until the last connection closes, or SIGTERM unless the caller handles it; returns
        the exit code."""
        loop = asyncio.get_running_loop()
        await self.listener.open()
        # Not from a pool: the loop does not wait for this thread at its end.
        self.making = loop.run_in_executor(ThreadPoolExecutor(1), self._make)
        alone = asyncio.create_task(self._wait_alone(connect_s))
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            loop.add_signal_handler(signal.SIGTERM, alone.cancel)
        beating = asyncio.create_task(self._beat())
        try:
            await asyncio.wait([alone])
            if not self.making.done() or self.making.exception() is not None:
                return FAILED
            await self.making.result().close()
            return 0
        finally:
            beating.cancel()
            await self.listener.close()

    async def _wait_alone(self, connect_s: float) -> None:
        try:
            async with asyncio.timeout(connect_s):
                await self.listener.had_any.wait()
        except TimeoutError:
            log.error("no connection within %g s", connect_s)
            return
        await self.listener.wait_alone()

    def _make(self) -> Hosted:
        make = load(self.job["target"])  # its imports must precede seeding
        seed_globals(self.job["seed"], self.job["name"])
        made: Hosted = make(self.job["payload"], self.emit)
        return made

    def emit(self, event: str, value: Any) -> None:
        for connection in self.listener.connections:
            connection.emit(event, value)

    async def _beat(self) -> None:
        """Sends a heartbeat, unless the other end has not read the previous one."""
        while True:
            made = self.making
            assert made is not None
            stats = made.result().stats() if made.done() and not made.exception() else {}
            for connection in self.listener.connections:
                if not connection.is_behind:
                    connection.emit("beat", stats)
            await asyncio.sleep(self.job["beat_s"])

    async def _serve(self, method: str, arguments: dict[str, Any]) -> Any:
        assert self.making is not None
        try:
            hosted = await asyncio.shield(self.making)
        except (RunError, UserError):
            raise
        except Exception as error:
            raise RunError(f"{self.job['name']} could not be made: {error!r}") from error
        serving = None if method.startswith("_") else getattr(hosted, method, None)
        if not inspect.iscoroutinefunction(serving):
            raise RunError(f"{self.job['name']} has no method {method}")
        return await serving(**arguments)


def main() -> int:
    return run_job(wait_for_job(sys.argv[1:]))


def run_job(job: Mapping[str, Any]) -> int:
    """Runs this process with a listening socket `listen_fd`; returns its exit code."""
    set_up(job)
    try:
        return serve(job, socket.socket(fileno=job["listen_fd"]))
    except Exception:
        traceback.print_exc()
        return FAILED


def set_up(job: Mapping[str, Any]) -> None:
    """Sets up a role process: stacks on SIGUSR1, a log, and the parent's import path."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format=FORMAT)
    sys.path += [folder for folder in job["path"] if folder not in sys.path]


def serve(job: Mapping[str, Any], sock: socket.socket) -> int:
    sock.setblocking(False)
    return asyncio.run(RoleHost(job, sock).run())


if __name__ == "__main__":
    code = main()
    flush_output()
    os._exit(code)  # threads may still be working on results that are no longer needed
