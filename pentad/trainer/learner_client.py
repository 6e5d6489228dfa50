"""The scheduler's client of a learner or a scorer: ordered calls on all its ranks, and queries to
its rank 0.

It hides the transport: a plain call if rank 0 is this process, which torchrun's rank 0 broadcasts
to the others (`runtime.calls`), or connections to processes (`runtime.group_calls`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from pentad.runtime.awake import awake_s
from pentad.runtime.calls import RankCalls
from pentad.runtime.group_calls import RankGroup

T = TypeVar("T")

CAUSE_S, LOOK_S = 5.0, 0.1
"""Seconds to wait for the cause of a follow-up failure, and the interval of the checks."""


Carrier = RankCalls | RankGroup
"""Both carriers have the same methods and state, which the client exposes."""


class LearnerClient:
    """Calls of an event loop run on a daemon thread: a call that never returns must not keep the
    program from exiting."""

    def __init__(self, carrier: Carrier, name: str = "learner") -> None:
        self.carrier = carrier
        self.name = name
        self.is_stopping: Callable[[], bool] = bool
        """Set by the run: returns whether the run is being stopped."""
        carrier.is_stopping = lambda: self.is_stopping()
        self.queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.since: float | None = None
        """When the call in progress began."""
        self.is_given_up = False
        """Set by a caller that no longer waits for the call in progress."""
        self.thread: threading.Thread | None = None
        """Started by the first call from an event loop."""

    # Calls

    def call_all(self, method: str, **arguments: Any) -> Any:
        """Calls a method on all ranks of the learner; JSON in, JSON out. Waits for the answer of
        rank 0."""
        return self.carrier.call(method, **arguments)

    def query(self, method: str, **arguments: Any) -> Any:
        """Calls rank 0 only; allowed at any time."""
        return self.carrier.ask(method, **arguments)

    async def call(self, method: str, **arguments: Any) -> Any:
        """`call_all` from an event loop, on the client's thread."""
        return await self.run(lambda: self.call_all(method, **arguments))

    async def run(self, function: Callable[[], T]) -> T:
        """Runs a function that makes several calls, or must not run beside a call."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name=self.name, daemon=True)
            self.thread.start()
        future: Future[T] = Future()
        self.queue.put((function, future))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while (call := self.queue.get()) is not None:
            function, future = call
            if not future.set_running_or_notify_cancel():
                continue
            self.since = awake_s()
            try:
                future.set_result(function())
            except BaseException as error:  # raised in the caller
                future.set_exception(error)
            self.since = None

    def close(self, limit_s: float) -> None:
        """Waits for the call in progress, until that call has taken `limit_s` in total."""
        if self.thread is None:
            return
        self.queue.put(None)
        since = awake_s() if self.since is None else self.since
        while not self.is_given_up and self.thread.is_alive():
            if awake_s() > since + limit_s:
                self.is_given_up = True
            self.thread.join(0.05)

    # State

    @property
    def device(self) -> Any:
        """The learner's device."""
        return self.carrier.device

    @property
    def service(self) -> Any:
        """The service of rank 0 if it is this process; else None."""
        return self.carrier.service

    @property
    def is_remote(self) -> bool:
        """Whether rank 0 is another process."""
        return self.carrier.is_remote

    @property
    def is_alone(self) -> bool:
        """Whether the learner is one rank in this process, which no other process monitors."""
        return self.carrier.is_alone

    @property
    def is_broken(self) -> bool:
        """Whether a failed call makes further calls impossible."""
        return self.carrier.is_broken

    @property
    def is_gone(self) -> bool:
        """Whether no rank can answer any more."""
        return self.is_broken and self.is_remote

    @property
    def straggler(self) -> int | None:
        """The rank that the others wait for, if known."""
        return self.carrier.straggler

    def check(self) -> None:
        """Raises the failure that ended the learner between calls, if there is one."""
        self.carrier.check()

    async def find_cause(self) -> None:
        """Raises the failure that ended the learner, if it becomes known within CAUSE_S. Called
        after failures that may be its consequence."""
        for _ in range(round(CAUSE_S / LOOK_S) if self.is_remote else 0):
            self.check()
            await asyncio.sleep(LOOK_S)
