"""The rollout pump: admits prompts as far as the budget allows and turns them into ready groups."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from pentad.core.errors import DataFailure, InfraFailure, RunError, Transient
from pentad.core.types import Group
from pentad.data.prompts import Prompts, RejectedPrompt
from pentad.rl.section import AlgorithmConfig
from pentad.rl.shaping import has_signal
from pentad.rollout.drafts import Draft
from pentad.rollout.executor import Executor, Executors
from pentad.telemetry.timeline import gate_of
from pentad.trainer.pumps.oversampling import Oversampling
from pentad.trainer.pumps.state import RunState
from pentad.trainer.sampling.placement import DeviceTurns

log = logging.getLogger(__name__)

MAX_DRAWS_PER_SLOT = 50
"""If a batch needs more prompts per slot than this, the run stops."""

MIN_ALIKE = 4
"""Minimum number of alike failures that stop a run, for batches smaller than this."""

REJECTIONS = {"no_signal": "all rewards of such a group are equal"}
"""Explanations of the reasons why finished groups are rejected."""


@dataclass(eq=False)
class RolloutPump:
    """Keeps every open batch filled. The slot of a dropped group goes to the next prompt.

    On-policy, refills start only when nothing is running: the set of sequences decoded together is
    then a function of the data alone, and so is every bit of the run.
    """

    state: RunState
    stream: Prompts
    executor: Executor | Executors
    device_turns: DeviceTurns
    reject: Callable[[Group], str | None]
    _: KW_ONLY
    max_groups: int | None = None
    """Limit of concurrent groups; None: only the staleness budget limits them."""
    oversampling: Oversampling | None = None
    """Set if a step starts more groups than it trains."""
    running: int = 0
    last_failures: dict[str, str] = field(default_factory=dict)
    """Reason of a drop -> the latest message."""
    num_scored: int = 0
    """Number of groups that were scored, trained or not."""
    failed_alike: dict[str, int] = field(default_factory=dict)
    """Message of a failed group, without its numbers -> how often it occurred."""

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            if self.oversampling is not None:
                self.oversampling.close()

    async def _run(self) -> None:
        rolling: dict[asyncio.Task[None], int] = {}  # in the order of their start
        self.num_scored = self.state.ledger.funnel().trained
        async with asyncio.TaskGroup() as tasks:
            while not self.state.is_over:
                if not self._can_admit():
                    why = self._why_idle()
                    await self.state.wait_for(
                        "rollout", why, partial(self._has_moved, gate_of(why))
                    )
                    continue
                await self.device_turns.enter("rollout")
                for gid in self._next_groups():
                    self.running += 1
                    task = tasks.create_task(self._roll(gid), name=f"group {gid}")
                    rolling[task] = gid
                    task.add_done_callback(rolling.pop)
            for task in rolling:  # the run is over; do not wait for these
                task.cancel()

    @property
    def _most(self) -> int:
        return self.max_groups or self.state.budget.capacity_groups

    def _next_groups(self) -> list[int]:
        """Returns the next groups to sample: first planned groups of a resumed run and lost groups,
        then newly admitted ones."""
        if self.oversampling is not None:
            return self.oversampling.next_groups(self._admit)
        room = self._most - self.running
        if planned := self.state.planned:
            now, self.state.planned = planned[:room], planned[room:]
            return now
        batch = self._next_batch()
        return [] if batch is None else self._admit(batch, room)

    def _next_batch(self) -> int | None:
        """Returns the oldest open batch with free slots."""
        batch = self.state.ledger.next_batch
        return batch if self.state.budget.may_admit(batch) else None

    def _can_admit(self) -> bool:
        if self.oversampling is not None:
            return not self.running and self.oversampling.is_due
        if self.running >= (1 if self.state.budget.is_on_policy else self._most):
            return False
        return bool(self.state.planned) or self._next_batch() is not None

    def _has_moved(self, gate: str) -> bool:
        """Whether groups can be admitted, or the gate that blocks them has changed."""
        return self._can_admit() or gate_of(self._why_idle()) != gate

    def _why_idle(self) -> str:
        """Returns the gate that blocks admission, and after a colon the event that opens it."""
        budget = self.state.budget
        if budget.is_on_policy and self.running:
            return f"running groups: {self.running} must finish"
        if self.max_groups is not None and self.running >= self.max_groups:
            return f"max_concurrent_groups: one of {self.running} running groups must finish"
        return budget.closed_gate(budget.last_open_batch + 1) or "slots: all are taken"

    def _admit(self, batch: int, room: int) -> list[int]:
        ledger = self.state.ledger
        drawn = ledger.num_drawn(batch) + ledger.num_missing(batch)
        if drawn > MAX_DRAWS_PER_SLOT * self.state.budget.groups_per_batch:
            raise RunError(
                f"batch {batch} drew {drawn} prompts for "
                f"{self.state.budget.groups_per_batch} slots and is still not full; "
                f"dropped so far: {self._why_dropped()}"
            )
        return [ledger.admit(batch) for _ in range(min(room, ledger.num_missing(batch)))]

    def _why_dropped(self) -> str:
        """Returns the number of drops by reason, each with the latest message."""
        reasons = []
        for reason, count in self.state.ledger.funnel().dropped.items():
            last = self.last_failures.get(reason)
            reasons.append(f"{count} {reason}" + (f" ({last})" if last else ""))
        return ", ".join(reasons)

    def _stop_if_all_fail(self, gid: int, failure: DataFailure) -> None:
        """Stops the run if a batch's number of groups failed alike and none was ever scored: then
        the cause is the reward or the workflow, not the prompts."""
        kind = re.sub(r"[0-9]+", "#", str(failure))
        self.failed_alike[kind] = self.failed_alike.get(kind, 0) + 1
        num = max(MIN_ALIKE, self.state.budget.groups_per_batch)
        if not self.num_scored and len(self.failed_alike) == 1 and self.failed_alike[kind] >= num:
            where = self.stream.row_of(gid)
            raise RunError(f"the first {num} groups failed alike, the last ({where}): {failure}")

    async def _roll(self, gid: int) -> None:
        """Samples one group; it becomes ready, or is dropped with a reason."""
        ledger = self.state.ledger
        attempt = ledger.start(gid)
        draft = self._draft(gid, asyncio.current_task())
        try:
            prompt = self.stream.prompt(gid)
            group = await self.executor.rollout(prompt, attempt, draft)
            self.num_scored += 1
            reason = self.reject(group)
            if reason is None:
                self._take(group, attempt)
            else:
                self.last_failures[reason] = REJECTIONS.get(reason, "")
                ledger.drop(gid, reason)
        except asyncio.CancelledError:
            if self.oversampling is None or not draft.is_cut:
                raise
            self.oversampling.carry(prompt, attempt, draft)
        except (DataFailure, RejectedPrompt) as failure:
            log.warning("group %d dropped: %s", gid, failure)
            self.last_failures[failure.reason] = f"the last: {failure}"
            ledger.drop(gid, failure.reason)
            if isinstance(failure, DataFailure) and not failure.is_final:
                self._stop_if_all_fail(gid, failure)
        except InfraFailure as failure:
            raise Transient(f"group {gid} could not be generated: {failure}") from failure
        finally:
            self._leave(gid)

    def _draft(self, gid: int, task: asyncio.Task[Any] | None) -> Draft:
        if self.oversampling is None or task is None:
            return Draft()
        return self.oversampling.begin(gid, task)

    def _take(self, group: Group, attempt: int) -> None:
        if self.oversampling is not None:
            self.oversampling.complete[group.gid] = group, attempt
            return
        self.state.put(group)
        self.state.ledger.commit(group.gid, attempt)

    def _leave(self, gid: int) -> None:
        self.running -= 1
        if self.oversampling is not None:
            self.oversampling.leave(gid)
        self.state.changed.notify()


def rejection(settings: AlgorithmConfig) -> Callable[[Group], str | None]:
    """Returns a function that gives the reason why a group is not trained; None: it is."""

    def reject(group: Group) -> str | None:
        if settings.dynamic_filter and not has_signal([s.reward or 0.0 for s in group.samples]):
            return "no_signal"
        if not any(sample.mask.any() for sample in group.samples):
            return "nothing_sampled"
        return None

    return reject
