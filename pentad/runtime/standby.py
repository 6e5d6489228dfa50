"""Processes that wait for the job of a role: new ones, and standbys, which have imported a rank's
modules and wait to replace a rank.

Importing Python's modules and torch takes most of the time of replacing a lost rank.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from pentad.runtime.helper import Channel, accept_channel
from pentad.runtime.process import Child

log = logging.getLogger(__name__)

NAME = "standby-" + "." * 24
"""Name in the command line of a standby, padded for the name of its later role."""
ARGUMENTS, ENVIRONMENT = 45, 47
"""Positions of the addresses in /proc/PID/stat, counted after the program's name."""
IMPORTED_LATE = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"),
    "transformers.models.auto.tokenization_auto",
)
"""Further modules that a model and its tokenizer import; they take seconds of CPU time."""


@dataclass(eq=False)
class Waiting:
    """A process that waits for its job, and the channel to it."""

    process: Child
    channel: Channel

    @classmethod
    def start(cls, words: Sequence[str], environment: Mapping[str, str], **given: Any) -> Waiting:
        """`words`: the command, the name of the role, and for a standby its modules."""
        child, ours = Child.connected(words, environment=environment, **given)
        return cls(child, Channel(ours))

    def is_ready(self) -> bool:
        """Waits until it has imported everything; returns False if it ended before."""
        try:
            return bool(self.channel.receive())
        except EOFError:
            return False

    def take(self, job: Mapping[str, Any]) -> Child | None:
        """Makes it the process of a job; None if it has died."""
        try:
            with self.channel.sock:
                self.channel.send(job)
        except ConnectionError:
            self.process.end()
            return None
        self.process.log = Path(job["log"])
        return self.process

    def end(self) -> None:
        self.channel.sock.close()
        self.process.end()


@dataclass(eq=False)
class StandbyPool:
    """Keeps a number of standbys ready, starting with the first `fill`."""

    command: Sequence[str]
    count: int
    modules: Sequence[str]
    environment: Mapping[str, str]
    ready: list[Waiting] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    filling: threading.Thread | None = None
    starting: Waiting | None = None
    is_closed: bool = False

    def fill(self) -> None:
        """Starts the missing ones, one after the other, in the background."""
        if self.filling is None or not self.filling.is_alive():
            self.filling = threading.Thread(target=self._fill, name="standbys", daemon=True)
            self.filling.start()

    def take(self, job: Mapping[str, Any]) -> Child | None:
        """Turns a ready standby into the process of this job; None if none is ready."""
        while True:
            with self.lock:
                if not self.ready:
                    return None
                standby = self.ready.pop(0)
            if (process := standby.take(job)) is not None:
                return process

    def close(self) -> None:
        """Ends the standby processes."""
        self.is_closed = True
        if self.filling is not None:
            if (starting := self.starting) is not None:
                starting.process.end()  # do not wait for a standby that hangs in its imports
            self.filling.join()
        while self.ready:
            self.ready.pop().end()

    def _fill(self) -> None:
        while not self.is_closed and len(self.ready) < self.count:
            try:
                words, quiet = [*self.command, NAME, ",".join(self.modules)], DEVNULL
                standby = Waiting.start(words, self.environment, stdout=quiet, stderr=quiet)
                self.starting = standby
            except OSError as error:
                log.warning("a standby could not be started (%s); none are kept", error)
                self.count = 0
                return
            if not standby.is_ready():
                standby.end()
                if not self.is_closed:
                    log.warning("a standby ended before it was ready; none are kept")
                self.count = 0
                return
            self.starting = None
            with self.lock:
                self.ready.append(standby)


def wait_for_job(words: Sequence[str]) -> dict[str, Any]:
    """Runs in the process: a standby imports its modules and reports; then waits for its job and
    returns it."""
    _, *modules, fd, parent = words
    channel = accept_channel(fd, parent)
    for module in modules[0].split(",") if modules else ():
        importlib.import_module(module)
    if modules:
        channel.send(True)
    job = receive_job(channel)
    return stand_in(job) if modules else job


def receive_job(channel: Channel) -> dict[str, Any]:
    """Waits for the job that `Waiting.take` sends; exits if the channel closes."""
    with channel.sock:
        try:
            job: dict[str, Any] = channel.receive()
        except EOFError:
            sys.exit(0)
    return job


def stand_in(job: dict[str, Any]) -> dict[str, Any]:
    """Sets log, environment, threads and name of the job in this running process."""
    with Path(job["log"]).open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ.update(job["standing_in"])
    threads = job["standing_in"].get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    if "torch" in sys.modules and threads:  # torch has already read the variable
        sys.modules["torch"].set_num_threads(int(threads))
    rename(job["name"])
    return job


def rename(name: str) -> None:
    """Replaces the standby's name in the command line by that of the role, for process listings;
    replaces the whole line if it belongs to another program."""
    if sys.platform != "linux":
        return
    words = Path("/proc/self/cmdline").read_bytes()
    place = words.find(NAME.encode())
    if place >= 0:
        overwrite(ARGUMENTS, words[:place] + name.encode()[: len(NAME)])
    else:
        overwrite(ARGUMENTS, f"python -m pentad.runtime.role_host {name}".encode())


def overwrite(region: int, text: bytes) -> None:
    """Overwrites the command line in /proc, as far as the text fits; nothing else reads that
    memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    start, end = int(fields[region]), int(fields[region + 1])
    size = end - start
    ctypes.memmove(start, text[: size - 1].ljust(size, b"\0"), size)
