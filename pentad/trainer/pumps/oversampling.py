"""Over-sampling: a step starts more groups than it trains. Once enough groups are complete, the
others are interrupted and continue in the next step with the tokens they have.

No interrupted group is dropped, because that would favour short answers; they come first in the
next step. A group that reached its maximum number of interruptions is waited for.

To keep runs repeatable, the choice of trained groups and the points of interruption must not depend
on timing. So an embedded sampler in this process pauses once as many requests have ended as are
missing, until their samples are scored and show whether more are needed. With other samplers the
points of interruption depend on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from pentad.core.types import Group, Prompt
from pentad.rollout.drafts import Draft, answers_of, as_group
from pentad.telemetry.record import Oversampled
from pentad.trainer.pumps.state import RunState

HoldAfter = Callable[[int | None], None]
"""Makes the sampler pause after this many more requests; None: no pause."""


@dataclass(eq=False)
class Oversampling:
    """The groups of one step, from their start until the trained ones are chosen."""

    state: RunState
    num_groups: int
    """Groups that a step starts: at least a batch, at most two, so that all carried groups fit into
    the next step."""
    _: KW_ONLY
    hold: HoldAfter = lambda num: None
    running: dict[int, tuple[Draft, asyncio.Task[Any]]] = field(default_factory=dict)
    complete: dict[int, tuple[Group, int]] = field(default_factory=dict)
    """Groups with rewards, and their attempts."""
    num_started: int = 0
    num_allowed: int = 0
    """Requests that samplers may answer before they pause, since groups were last started."""
    num_answered: int = 0
    """Requests that samplers answered, of groups whose tasks are over."""
    is_cutting: bool = False

    @property
    def batch(self) -> int:
        """The batch being sampled; without staleness only one is open."""
        return self.state.budget.trained

    @property
    def num_missing(self) -> int:
        """Slots of the batch for which there is no complete group yet."""
        ledger, size = self.state.ledger, self.state.budget.groups_per_batch
        filled = ledger.gids_at(self.batch, range(size), "sampled", "ready", "leased")
        return size - len(filled) - len(self.complete)

    @property
    def is_due(self) -> bool:
        """Whether groups must be started; only once none runs."""
        budget = self.state.budget
        is_open = self.batch < budget.num_batches and budget.may_admit(self.batch)
        return is_open and self.num_missing > 0

    def next_groups(self, admit: Callable[[int, int], list[int]]) -> list[int]:
        """Groups carried over from earlier steps, then new ones from `admit(batch, most)`."""
        state, budget = self.state, self.state.budget
        gids, state.planned = state.planned, []
        places = budget.groups_per_batch * (budget.num_batches - self.batch)
        while (room := min(self.num_groups, places) - state.ledger.funnel().in_flight) > 0:
            gids += admit(state.ledger.next_batch, room)
        self.num_started += len(gids)
        self.num_answered, self.num_allowed = 0, 0
        self._allow()
        return gids

    def _allow(self) -> None:
        num = max(1, self.num_missing)
        self.num_allowed += num
        self.hold(num)

    def begin(self, gid: int, task: asyncio.Task[Any]) -> Draft:
        held = self.state.carried.pop(gid, None)
        answers = answers_of(held) if held is not None else ()
        draft = Draft(answers, carries=True, changed=self.look)
        self.running[gid] = draft, task
        return draft

    def carry(self, prompt: Prompt, attempt: int, draft: Draft) -> None:
        """Keeps the tokens of an interrupted group."""
        self.state.ledger.carry(prompt.gid, attempt)
        if draft.answers:
            self.state.carried[prompt.gid] = as_group(prompt, attempt, draft.answers)

    def leave(self, gid: int) -> None:
        """Called when the group's task is over."""
        draft, _ = self.running.pop(gid)
        # A request in progress may have been answered too late.
        self.num_answered += draft.num_ended + draft.num_sampling
        self.look()

    def look(self) -> None:
        """Decides, after every change, whether sampling continues."""
        self.is_cutting = self.is_cutting or self._has_enough
        sampling = [one for one in self.running.values() if one[0].is_sampling]
        if self.is_cutting:
            for draft, task in sampling:
                if not draft.is_cut:
                    draft.is_cut = True
                    task.cancel()
            if not self.running:
                self._finish()
        elif len(sampling) == len(self.running):  # all answers are scored
            answered = self.num_answered + sum(draft.num_ended for draft, _ in sampling)
            if answered >= self.num_allowed:
                self._allow()

    @property
    def _has_enough(self) -> bool:
        ledger, most = self.state.ledger, self.state.budget.max_carries
        is_over = any(ledger.num_carries(gid) >= most for gid in self.running)
        return self.num_missing <= 0 and not is_over

    def _finish(self) -> None:
        """Assigns the oldest complete groups to the batch. The other complete groups and the
        interrupted ones are trained in the next batch."""
        state, chosen = self.state, sorted(self.complete)
        carried = sorted(state.ledger.gids_in("planned"))
        state.ledger.reseat([*chosen, *carried])
        for gid in chosen:
            group, attempt = self.complete[gid]
            state.put(group)
            state.ledger.commit(gid, attempt)
        state.planned = carried
        state.oversampled = Oversampled(
            started=self.num_started,
            complete=len(chosen),
            carried=len(carried),
            tokens_carried=num_tokens([state.carried[g] for g in carried if g in state.carried]),
            max_carries=max(map(state.ledger.num_carries, carried), default=0),
        )
        self.complete, self.num_started, self.is_cutting = {}, 0, False
        self.hold(None)
        state.changed.notify()

    def close(self) -> None:
        """Releases the sampler for other users."""
        self.hold(None)


def num_tokens(groups: Sequence[Group]) -> int:
    return sum(sample.num_sampled for group in groups for sample in group.samples)
