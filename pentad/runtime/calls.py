"""Calls of a learner that is this process: plain function calls.

Every rank of a learner has a service: an object with methods that take and return JSON values.
Ranks in other processes are called over connections (`runtime.group_calls`).
"""

from __future__ import annotations

from typing import Any, Protocol

from pentad.runtime.learner_client import LearnerClient
from pentad.runtime.rank import Rank


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
