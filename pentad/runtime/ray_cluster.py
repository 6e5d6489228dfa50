"""Monitors the Ray cluster of a run, and redirects what Ray prints.

Without its head (the GCS) every Ray call blocks for a minute, and then Ray ends the process. So the
head is monitored over a separate socket, and calls run outside of the event loop with a deadline: a
run whose cluster is lost ends with an error message.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pentad.core.errors import InfraFailure, RunError
from pentad.core.machine import flush_output

log = logging.getLogger(__name__)
T = TypeVar("T")

LOST_S = 15.0
"""Seconds without a connection after which a head is lost. Ray itself waits for a minute."""
LOOK_S, POLL_S = 1.0, 0.02
CALL_S = 20.0
"""Time limit of a Ray call that a healthy cluster answers at once."""


class ClusterLost(InfraFailure):
    """The cluster does not respond."""


class Cluster:
    """The cluster that this process is in."""

    def __init__(self, address: str) -> None:
        """`address`: host and port of its head."""
        self.address = address
        self.lost: str | None = None
        """Why the run cannot continue; None while the cluster responds."""
        self.is_left = threading.Event()
        threading.Thread(target=self._watch, name="ray cluster", daemon=True).start()

    def answers(self) -> bool:
        """Whether its head accepts connections now."""
        return answers(self.address)

    def _watch(self) -> None:
        away_s = 0.0
        while away_s < LOST_S and not self.is_left.wait(LOOK_S):
            away_s = 0.0 if self.answers() else away_s + LOOK_S
        if away_s >= LOST_S:
            self.lost = (
                f"the Ray cluster at {self.address} has ended: its head has accepted no connection "
                f"for {LOST_S:g} s; start the same command again, and the run resumes from its "
                "newest checkpoint"
            )

    async def run(self, call: Callable[[], T]) -> T:
        """Result of a Ray call without a time limit; RunError if the cluster is lost."""
        future = beside(call)
        while not future.done():
            if self.lost is not None:
                raise RunError(self.lost)
            await asyncio.sleep(POLL_S)
        return future.result()

    def ask(self, call: Callable[[], T], timeout_s: float = CALL_S) -> T:
        """Returns the result of a short call; ClusterLost if it exceeds the time limit."""
        if self.lost is not None or not self.answers():
            raise ClusterLost(f"the Ray cluster at {self.address} does not answer")
        return within(call, timeout_s)

    def leave(self, shut_down: Callable[[], None]) -> None:
        """Stops monitoring, and the processes started here. Ray's own shutdown at program exit
        would block without the head."""
        self.is_left.set()
        try:
            within(shut_down, CALL_S)
        except ClusterLost:
            atexit.unregister(shut_down)
            text = "Ray did not shut down within %g s; its guard ends its processes"
            log.warning(text, CALL_S)


def answers(address: str) -> bool:
    """Whether a port accepts connections; False for an address without a port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, ValueError, OverflowError):  # OverflowError: the port number is too large
        return False
    return True


def comes_up(address: str, within_s: float) -> bool:
    """Whether a port accepts connections within the time limit: a head may just be starting."""
    until = time.monotonic() + within_s
    while not answers(address):
        if time.monotonic() >= until:
            return False
        time.sleep(LOOK_S / 4)
    return True


def beside(call: Callable[[], T]) -> Future[T]:
    """Runs it in a daemon thread: program exit would wait for a pool's thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised in the caller
            future.set_exception(error)

    threading.Thread(target=run, name="ray call", daemon=True).start()
    return future


def within(call: Callable[[], T], timeout_s: float) -> T:
    """Returns the result of the call; raises ClusterLost and abandons it at the timeout."""
    future = beside(call)
    done, _ = wait([future], timeout_s)
    if not done:
        raise ClusterLost(f"a call of Ray took longer than {timeout_s:g} s")
    return future.result()


@contextmanager
def printed_to(path: Path | None) -> Iterator[None]:
    """Redirects the output of this process and its children to the file while active."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = [(number, os.dup(number)) for number in (1, 2)]
    try:
        with path.open("ab") as file:
            flush_output()
            for number, _ in saved:
                os.dup2(file.fileno(), number)
            yield
    finally:
        flush_output()
        for number, before in saved:
            os.dup2(before, number)
            os.close(before)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
