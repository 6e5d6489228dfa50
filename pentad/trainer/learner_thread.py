"""The one thread from which a learner or a scorer is called: its calls have one order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from pentad.runtime.awake import awake_s

T = TypeVar("T")


class Calls(Protocol):
    """How the scheduler's parts reach the learner: `runtime.calls` where rank 0 is this process,
    `runtime.group_calls` where all ranks are others."""

    is_torn: bool
    """Whether a call failed in a way after which no other can be made."""
    is_apart: bool
    """Whether rank 0 is another process."""
    is_alone: bool
    """Whether the learner is one rank in this process, which no one else watches."""
    service: Any
    """Of rank 0, where it is this process; else None."""
    is_leaving: Callable[[], bool]
    """Set by the run: whether it is being stopped."""

    @property
    def straggler(self) -> int | None:
        """The rank that the others wait for, where that is known."""
        ...

    @property
    def device(self) -> Any:
        """Where the learner computes."""
        ...

    def call(self, method: str, **arguments: Any) -> Any:
        """On all ranks of the learner; JSON in, JSON out. Waits for the answer."""
        ...

    def ask(self, method: str, **arguments: Any) -> Any:
        """Of its rank 0 alone, at any time."""
        ...

    def check(self) -> None:
        """Raises what ended the learner between calls."""
        ...


class LearnerThread:
    """A daemon: a call that never returns must not keep the program from ending."""

    def __init__(self, calls: Calls, name: str = "learner") -> None:
        self.calls = calls
        self.queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.since: float | None = None
        """When the call under way began."""
        self.is_given_up = False
        """Set by who will not wait for the call under way."""
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    async def call(self, method: str, **arguments: Any) -> Any:
        return await self.run(lambda: self.calls.call(method, **arguments))

    async def run(self, function: Callable[[], T]) -> T:
        """What makes several calls, or must not be made beside one."""
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
            except BaseException as error:  # it is the caller's
                future.set_exception(error)
            self.since = None

    def close(self, limit_s: float) -> None:
        """Waits for the call under way, as long as it has not taken `limit_s` in all."""
        self.queue.put(None)
        since = awake_s() if self.since is None else self.since
        while not self.is_given_up and self.thread.is_alive():
            if awake_s() > since + limit_s:
                self.is_given_up = True
            self.thread.join(0.05)
