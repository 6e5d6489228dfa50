"""The scheduler's client of a learner or a scorer: ordered calls on all its ranks, and queries to
its rank 0.

Every rank has a service: an object with methods that take and return JSON values.
`runtime.group_calls.RankGroup` calls it over a connection. A single rank may be this process, for
debuggers and laptops: then calls are function calls (`DirectCalls`).
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from pentad.runtime.awake import awake_s
from pentad.runtime.rank import Rank

T = TypeVar("T")

CAUSE_S, LOOK_S = 5.0, 0.1
"""Seconds to wait for the cause of a follow-up failure, and the interval of the checks."""


class LearnerClient(ABC):
    """Calls of an event loop run on a daemon thread: a call that never returns must not keep the
    program from exiting."""

    is_remote: bool
    """Whether the ranks are other processes, which are monitored."""
    service: Any
    """The service of the only rank if it is this process; else None."""
    device: Any
    """The learner's device."""
    straggler: int | None
    """The rank that the others wait for, if known."""

    def __init__(self, name: str = "learner") -> None:
        self.name = name
        self.is_stopping: Callable[[], bool] = bool
        """Set by the run: returns whether the run is being stopped."""
        self.is_broken = False
        """Whether a failed call makes further calls impossible."""
        self.queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.since: float | None = None
        """Time at which the call in progress began."""
        self.is_given_up = False
        """Set by a caller that no longer waits for the call in progress."""
        self.caller: threading.Thread | None = None
        """Started by the first call from an event loop."""

    @abstractmethod
    def call_all(self, method: str, **arguments: Any) -> Any:
        """Calls a method on all ranks, one call at a time, from any thread; JSON in, JSON out.
        Returns the answer of rank 0."""

    @abstractmethod
    def query(self, method: str, **arguments: Any) -> Any:
        """Calls rank 0 only, also during a call: for methods without communication between ranks
        and without device work."""

    @abstractmethod
    def check(self) -> None:
        """Raises the failure that ended the learner between calls, if there is one."""

    async def call(self, method: str, **arguments: Any) -> Any:
        """`call_all` from an event loop, on the client's thread."""
        return await self.run(lambda: self.call_all(method, **arguments))

    async def run(self, function: Callable[[], T]) -> T:
        """Runs a function that makes several calls, or must not run beside a call."""
        if self.caller is None:
            self.caller = threading.Thread(target=self._work, name=self.name, daemon=True)
            self.caller.start()
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
        if self.caller is None:
            return
        self.queue.put(None)
        since = awake_s() if self.since is None else self.since
        while not self.is_given_up and self.caller.is_alive():
            if awake_s() > since + limit_s:
                self.is_given_up = True
            self.caller.join(0.05)

    @property
    def is_gone(self) -> bool:
        """Whether no rank can answer any more."""
        return self.is_broken and self.is_remote

    async def find_cause(self) -> None:
        """Raises the failure that ended the learner, if it becomes known within CAUSE_S. Called
        after failures that may be its consequence."""
        for _ in range(round(CAUSE_S / LOOK_S) if self.is_remote else 0):
            self.check()
            await asyncio.sleep(LOOK_S)


class RankService(Protocol):
    """Interface of a rank's service, besides the methods that are called."""

    rank: Rank
    device: Any
    mild: frozenset[str]
    """Methods that may fail with OSError, RunError or UserError on all ranks together: the caller
    gets the error, and further calls are possible."""

    def close(self, *, is_failed: bool) -> None:
        """Waits for work in progress, or abandons it after a failure."""
        ...


class DirectCalls(LearnerClient):
    """The client of the only rank, in this process. A context manager: its exit ends the
    service."""

    is_remote = False
    straggler = None

    def __init__(self, service: RankService, name: str = "learner") -> None:
        super().__init__(name)
        self.service = service

    def call_all(self, method: str, **arguments: Any) -> Any:
        return getattr(self.service, method)(**arguments)

    def query(self, method: str, **arguments: Any) -> Any:
        return self.call_all(method, **arguments)

    @property
    def device(self) -> Any:
        return self.service.device

    def check(self) -> None:
        """Does nothing: failures are raised by the calls."""

    def __enter__(self) -> DirectCalls:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.service.close(is_failed=error is not None)
