"""Calls on all ranks of a group: rank 0 sends the call as JSON, every rank makes it.

The interface of the ranks is a service: an object with methods that take and return JSON values.
Rank 0 makes the calls (`RankCalls`), the others wait for them (`serve`). All ranks make the same
calls in one order; the answer is rank 0's.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from pentad.core.errors import RunError, Transient, UserError
from pentad.core.group_values import broadcast_value
from pentad.runtime.rank import Rank
from pentad.runtime.signals import handling_signals

PATIENCE = timedelta(days=60)
"""How long ranks wait for the next call: rank 0 may generate, evaluate or save for hours."""
ANSWER = timedelta(minutes=30)
"""How long rank 0 waits for the others to accept a call: they do the same work, so one that does
not is hung."""
STOP = "stop"
"""Not a method: ends the other ranks."""


class RankService(Protocol):
    """The service of every rank of a group, besides its own methods."""

    rank: Rank
    device: Any
    mild: frozenset[str]
    """Methods that may fail with OSError, RunError or UserError on all ranks together: the caller
    gets the error, and further calls can be made."""

    def close(self, *, is_failed: bool) -> None:
        """Ends work in progress: waits for it, or abandons it after a failure."""
        ...


def group_of_calls() -> dist.ProcessGroup:
    """Calls have a separate process group, because ranks wait long for the next one."""
    timeout = ANSWER if dist.get_rank() == 0 else PATIENCE
    return dist.new_group(backend="gloo", timeout=timeout)


class RankCalls:
    """Rank 0's end. With one rank a call is a plain call. Closing it, as a context, ends the other
    ranks and the service of this one."""

    is_remote = False
    straggler = None

    def __init__(self, service: RankService) -> None:
        assert service.rank.rank == 0, "calls go out from rank 0"
        self.service = service
        self.is_stopping: Callable[[], bool] = bool
        self.rank = service.rank
        self.is_alone = self.rank.world == 1
        self.group = group_of_calls() if self.rank.world > 1 else None
        self.lock = threading.Lock()
        self.is_broken = False
        """Whether a call failed here: the state of the other ranks is then unknown."""

    def call(self, method: str, **arguments: Any) -> Any:
        """Makes the call on all ranks, one at a time, from any thread; rank 0's answer."""
        if self.group is None:
            return getattr(self.service, method)(**arguments)
        with self.lock:
            if self.is_broken:
                raise Transient("the ranks do not answer any more: a call failed before")
            with self.rank.calling():
                try:
                    broadcast_value([method, arguments], self.group)
                    return getattr(self.service, method)(**arguments)
                except BaseException as error:
                    is_mild = isinstance(error, OSError | RunError | UserError)
                    self.is_broken = not (is_mild and method in self.service.mild)
                    raise

    def ask(self, method: str, **arguments: Any) -> Any:
        """A query to rank 0 only, during a call: for methods without communication between ranks
        and without device work."""
        return getattr(self.service, method)(**arguments)

    @property
    def device(self) -> Any:
        return self.service.device

    def check(self) -> None:
        """Failures of the other ranks are detected by the launcher that started them."""

    def __enter__(self) -> RankCalls:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A call that was given up may still be under way: the ranks are in the midst of it.
        is_idle = self.lock.acquire(blocking=False)
        if self.group is not None and is_idle and not self.is_broken:
            broadcast_value([STOP, {"is_whole": error is None}], self.group)
        self.service.close(is_failed=error is not None)


def serve(service: RankService) -> None:
    """Makes the calls that rank 0 sends, until it sends STOP. Signals that stop a run are handled
    by rank 0: one that reached all ranks would end some during a call."""
    with handling_signals(signal.SIG_IGN):
        _serve(group_of_calls(), service)


def _serve(group: dist.ProcessGroup, service: RankService) -> None:
    while True:
        try:
            method, arguments = broadcast_value(None, group)
        except RuntimeError as error:
            raise RunError(f"connection closed: rank 0 ended ({error})") from error
        if method == STOP:
            is_whole = arguments["is_whole"]
            service.close(is_failed=not is_whole)
            if not is_whole:  # rank 0 says why, and does not come to the end where ranks meet
                raise SystemExit(0)
            return
        with service.rank.calling():
            try:
                getattr(service, method)(**arguments)
            except (OSError, RunError, UserError):
                if method not in service.mild:
                    raise
