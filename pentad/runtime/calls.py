"""Calls on all ranks of a group: rank 0 sends the call as JSON, every rank makes it.

Every rank has a service: an object with methods that take and return JSON values. Rank 0 makes the
calls (`RankCalls`), the others wait for them (`serve`). All ranks make the same calls in one order;
the caller gets rank 0's result.
"""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from pentad.core.errors import RunError, Transient, UserError
from pentad.core.group_values import broadcast_value
from pentad.runtime.learner_client import LearnerClient
from pentad.runtime.rank import Rank
from pentad.runtime.signals import handling_signals

PATIENCE = timedelta(days=60)
"""How long ranks wait for the next call: rank 0 may generate, evaluate or save for hours."""
ANSWER = timedelta(minutes=30)
"""How long rank 0 waits for the others to accept a call: they do the same work, so a slower one is
hung."""
STOP = "stop"
"""Sent in place of a method name: ends the other ranks."""


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


def group_of_calls() -> dist.ProcessGroup:
    """Makes the process group for calls, separate because ranks may wait long for the next call."""
    timeout = ANSWER if dist.get_rank() == 0 else PATIENCE
    return dist.new_group(backend="gloo", timeout=timeout)


class RankCalls(LearnerClient):
    """Makes calls on all ranks, from rank 0; with one rank, plain calls. A context manager: its
    exit ends the other ranks and this rank's service."""

    is_remote = False
    straggler = None

    def __init__(self, service: RankService, name: str = "learner") -> None:
        super().__init__(name)
        assert service.rank.rank == 0, "only rank 0 makes calls"
        self.service = service
        self.rank = service.rank
        self.is_alone = self.rank.world == 1
        self.group = group_of_calls() if self.rank.world > 1 else None
        self.lock = threading.Lock()

    def call_all(self, method: str, **arguments: Any) -> Any:
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
                    # Otherwise the state of the other ranks is unknown.
                    is_mild = isinstance(error, OSError | RunError | UserError)
                    self.is_broken = not (is_mild and method in self.service.mild)
                    raise

    def query(self, method: str, **arguments: Any) -> Any:
        return getattr(self.service, method)(**arguments)

    @property
    def device(self) -> Any:
        return self.service.device

    def check(self) -> None:
        """Does nothing: the launcher detects failures of the other ranks."""

    def __enter__(self) -> RankCalls:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # An abandoned call may still be in progress on the ranks.
        is_idle = self.lock.acquire(blocking=False)
        if self.group is not None and is_idle and not self.is_broken:
            broadcast_value([STOP, {"is_whole": error is None}], self.group)
        self.service.close(is_failed=error is not None)


def serve(service: RankService) -> None:
    """Makes the calls that rank 0 sends, until it sends STOP. Only rank 0 handles signals that stop
    a run: handled on all ranks, they would end some during a call."""
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
            if not is_whole:  # rank 0 reports the reason, and does not reach the final barrier
                raise SystemExit(0)
            return
        with service.rank.calling():
            try:
                getattr(service, method)(**arguments)
            except (OSError, RunError, UserError):
                if method not in service.mild:
                    raise
