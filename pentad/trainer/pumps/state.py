"""Shared state of the pumps: ledger, store, staleness budget, and a change signal."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pentad.core.types import Group
from pentad.data.ledger import Ledger, read_live
from pentad.data.store import GroupStore
from pentad.engine.state import read_random, write_random
from pentad.telemetry.record import Oversampled
from pentad.telemetry.timeline import timeline
from pentad.trainer.stopping import StopFlag


@dataclass(slots=True)
class Budget:
    """Limits the staleness of samples with two counters.

    Batch b is trained by the step that turns version b into version b + 1. It may be admitted once
    b <= published + max_staleness. Tokens are sampled at `published` at admission or newer, so
    trained version - token version <= max_staleness always holds; no sample is discarded, and slow
    prompts are not starved.
    """

    groups_per_batch: int
    max_staleness: int
    num_batches: int
    """Batches of the whole run; none beyond the last is admitted."""
    trained: int = 0
    """Batches trained; equals the learner's version."""
    published: int = 0
    """Oldest version that a serving sampler holds."""
    max_carries: int = 0
    """How often a group may be interrupted and continue in the next step, one version later."""

    @property
    def capacity_groups(self) -> int:
        """Maximum number of groups in flight; derived, because a smaller number could deadlock."""
        return self.groups_per_batch * (self.max_staleness + 1)

    @property
    def is_on_policy(self) -> bool:
        """Whether all trained samples come from the current weights; such runs are repeatable."""
        return self.max_staleness == 0

    @property
    def max_lag(self) -> int:
        """Maximum difference between the version of trained weights and that of a token."""
        return self.max_staleness + self.max_carries

    @property
    def last_open_batch(self) -> int:
        """The newest batch whose groups may be admitted now."""
        return min(self.published + self.max_staleness, self.num_batches - 1)

    def may_admit(self, batch: int) -> bool:
        return batch <= self.last_open_batch

    def closed_gate(self, batch: int) -> str:
        """Returns why groups of `batch` are not admitted now; empty if they are."""
        if self.may_admit(batch):
            return ""
        if batch >= self.num_batches:
            last = self.num_batches - 1
            return f"end of the run: batch {batch} lies beyond the last ({last})"
        return (
            f"staleness: batch {batch} waits for version {batch - self.max_staleness} to be "
            f"published (published {self.published}, max_staleness {self.max_staleness})"
        )

    def count_trained(self) -> None:
        self.trained += 1

    def count_published(self, version: int) -> None:
        assert version >= self.published, "versions only grow"
        self.published = version


log = logging.getLogger(__name__)

KEEP_S = 1.0
"""Interval at which the store is checked for lost groups."""


class Signal:
    """Wakes tasks whose condition holds after a change of the run's state. For one event loop only.

    Conditions are evaluated once for all changes in a turn of the loop, and only tasks whose
    condition holds are woken; this matters with thousands of groups in flight.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._is_due = False

    def notify(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_due = False
        for woken, predicate in self._waiting.items():
            try:
                if not woken.done() and predicate():
                    woken.set_result(None)
            except Exception as error:  # raised in the waiting task
                woken.set_exception(error)

    async def until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            woken = asyncio.get_running_loop().create_future()
            self._waiting[woken] = predicate
            try:
                await woken
            finally:
                del self._waiting[woken]


@dataclass(frozen=True, slots=True)
class DataProgress:
    """Progress of the data between two events of the loop."""

    ledger: dict[str, Any]
    """A snapshot of the ledger."""
    ready: list[Group]
    """The groups with samples; planned ones among them have only part of their tokens."""


@dataclass(slots=True)
class RunState:
    ledger: Ledger
    store: GroupStore
    budget: Budget
    changed: Signal = field(default_factory=Signal)
    stop: StopFlag = field(default_factory=StopFlag)
    """Set by a signal to end the run after the step in progress."""
    waiting: dict[str, str] = field(default_factory=dict)
    """The condition each pump waits for; the watchdog reads it."""

    planned: list[int] = field(default_factory=list)
    """Groups to be started, or restarted, before any other is admitted."""
    held: dict[int, Group] = field(default_factory=dict)
    """Groups with samples that are not trained yet; if the store loses one, it is put again."""

    carried: dict[int, Group] = field(default_factory=dict)
    """Partial samples of planned groups that were interrupted; samples to continue have finish
    "abort"."""
    oversampled: Oversampled | None = None
    """Figures of the last over-sampled step, until they are recorded."""

    working: list[str] = field(default_factory=list)
    """Work in progress that may take long."""

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        self.working.append(what)
        try:
            yield
        finally:
            self.working.remove(what)

    def progress(self) -> DataProgress:
        groups = self.held | self.carried
        return DataProgress(self.ledger.snapshot(), [groups[gid] for gid in sorted(groups)])

    def put(self, group: Group) -> None:
        """Puts a group into the store, from which learners and scorers read it."""
        self.held[group.gid] = group
        self.store.put(group)

    def drop(self, gids: Iterable[int]) -> None:
        """Drops groups that are no longer needed from the store."""
        gids = list(gids)
        for gid in gids:
            self.held.pop(gid, None)
        self.store.delete(gids)

    def lease(self, batch: int, slots: Iterable[int]) -> list[Group]:
        """Leases the ready groups of these slots."""
        return [self.held[gid] for gid in self.ledger.lease(batch, slots)]

    @asynccontextmanager
    async def kept(self, gids: Iterable[int]) -> AsyncIterator[None]:
        """While active, puts these groups again if the store loses them."""
        gids = list(gids)
        self._put_missing(gids)
        keeping = asyncio.ensure_future(self._keep(gids))
        try:
            yield
        finally:
            keeping.cancel()

    async def _keep(self, gids: list[int]) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            self._put_missing(gids)

    def _put_missing(self, gids: list[int]) -> None:
        lost = self.store.missing(gids)
        if lost:
            log.warning("the store lost the samples of %d groups, which are put again", len(lost))
        for gid in lost:
            self.store.put(self.held[gid])

    def resume(
        self,
        snapshot: Mapping[str, Any],
        groups: Iterable[Group],
        trained: int,
        *,
        continues: bool = True,
        needs_greedy: bool = False,
    ) -> None:
        """Replaces the state by a snapshot. Groups older than the budget allows and groups in
        progress are sampled again; without `continues` also interrupted ones, and with
        `needs_greedy` ready ones that have no greedy answer. For a snapshot that
        `progress` could not have returned, raises LookupError, TypeError or ValueError and changes
        nothing."""
        if snapshot["groups_per_batch"] != self.ledger.groups_per_batch:
            raise ValueError(f"a batch has {snapshot['groups_per_batch']} groups")
        live = {
            gid: (batch, state, num_carries)
            for gid, batch, _, state, _, num_carries in map(read_live, snapshot["live"])
        }
        kept, carried = {}, {}
        for group in groups:
            batch, state, num_carries = live[group.gid]
            if state == "planned":
                if continues and num_carries <= self.budget.max_carries:
                    carried[group.gid] = group
            elif needs_greedy and group.greedy is None:
                continue
            elif batch - group.min_version <= self.budget.max_lag:
                kept[group.gid] = group
        restored = Ledger.restore(snapshot, kept, has_scorers=self.ledger.has_scorers)
        self.drop(list(self.held))
        self.ledger, self.planned, self.carried = restored, restored.gids_in("planned"), carried
        self.oversampled = None
        for group in kept.values():
            self.put(group)
        self.budget.trained = self.budget.published = trained

    def request_stop(self, reason: str) -> None:
        self.stop.request(reason)
        self.changed.notify()

    @property
    def is_over(self) -> bool:
        return bool(self.stop.reason) or self.budget.trained >= self.budget.num_batches

    async def wait_for(self, pump: str, what: str, predicate: Callable[[], bool]) -> None:
        """Waits for the predicate or the end of the run; `waiting` has the reason meanwhile."""
        self.waiting[pump] = what
        with timeline.span(f"{pump} waits", what):
            await self.changed.until(lambda: predicate() or self.is_over)
        self.waiting.pop(pump, None)


class ProcessRandom:
    """The random generators of the scheduler's process, which workflows may use. A
    `recovery.RunPart`."""

    def state(self) -> dict[str, str]:
        held = read_random(0, torch.device("cpu"))
        return {k: base64.b64encode(x.numpy().tobytes()).decode() for k, x in held.items()}

    def restore(self, state: dict[str, str]) -> None:
        held = read_random(0, torch.device("cpu"))
        for name, tensor in held.items():
            data = np.frombuffer(base64.b64decode(state[name]), tensor.numpy().dtype)
            tensor.copy_(torch.from_numpy(data.copy()))
        write_random(held, torch.device("cpu"))
