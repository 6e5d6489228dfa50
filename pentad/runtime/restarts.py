"""The restart policy: decides what follows the loss of a process, and counts failures, generations
and retired slots, for training ranks, scorers, samplers and servers.

It maps losses to decisions, without I/O. A process without slots and steps (a scorer, a sampler, a
server) has one count of losses, reset by each answer:

    policy = RestartPolicy(retries=config.rollout.restarts)
    process = start(policy.generation)
    policy.note_progress()                # with every answer
    if not policy.restarts_after(cause):  # it was lost: the next generation, or none
        raise GivenUp(...)

For training ranks the slot is the first suspect: it is retired, and the others train without it. If
the same exception comes from another slot, or no slot explains the failures of a step, the cause is
the step or the code.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from pentad.runtime.slots import listed

SAME_STEP = 3
"""A step counts as the cause after this number of consecutive failures of one group at it, or of
different slots."""
LossKind = Literal["died", "stuck", "raised", "away"]
NOT_AGAIN = "it is not started again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The loss of a process."""

    kind: LossKind
    """died: ended by a signal or an exit code, or out of memory; stuck: hung; raised: an exception
    of the code; away: its slot is gone, because its machine is lost or the slot was removed."""
    cause: str
    """One line."""
    slot: int | None = 0
    """None: no rank's own failure, for example the consequence of an unobserved failure."""
    step: int | None = None
    """The step in progress; None: the group was not ready to train."""
    newest: int = -1
    """Step of the newest checkpoint; -1 without any."""
    can_shrink: bool = False
    """Whether the other slots can train without this one."""


@dataclass(frozen=True, slots=True)
class Decision:
    action: Literal["restart", "retire", "regroup", "stop"]
    """restart: with the same slots; retire: without the faulty slot; regroup: with the available
    slots; stop: the run ends."""
    why: str
    """Text of the action, for use after the cause and a semicolon; retire: the reason. Empty: no
    decision was needed."""
    diagnosis: str = ""
    """stop: the faulty part, for use before the cause; empty: the cause is sufficient."""
    give_back: tuple[int, ...] = ()
    """stop: retired slots that were not at fault."""


@dataclass(slots=True)
class RestartPolicy:
    """The policy of one group of ranks, or one process. Example: RestartPolicy(retries=3)."""

    retries: int
    """Restarts in a row without progress: no checkpoint (`recover.retries`), no answer
    (`rollout.restarts`)."""
    slot_failures: int | None = None
    """Failures after which a slot is retired; None: slots are never retired."""
    newest: int = -1
    """Step of the newest checkpoint when the last loss was counted."""
    used: int = 0
    """Restarts of this group since it made progress."""
    generation: int = 0
    """Number of groups before the present one."""
    failures: Counter[int] = field(default_factory=Counter)
    """Number of failures by slot since the last progress."""
    retired: list[int] = field(default_factory=list)
    """Slots retired since the last progress."""
    step: int | None = None
    """The step of the last loss."""
    num_here: int = 0
    """Consecutive losses at that step, of this group."""
    num_in_all: int = 0
    """Consecutive losses at that step, including earlier groups."""
    slots_here: dict[int, None] = field(default_factory=dict)
    """Slots of these losses, over all groups, in order."""
    raised: dict[str, int | None] = field(default_factory=dict)
    """Exceptions at that step by their digest, with the slot that raised each first."""

    def decide(self, lost: Lost) -> Decision:
        decision = self._gone(lost) if lost.kind == "away" else self._failed(lost)
        if decision.action in ("retire", "regroup"):
            self.count_anew()
        self.generation += decision.action != "stop"
        return decision

    def restarts_after(self, cause: str) -> bool:
        """Whether to restart a lost process without slots and steps."""
        return self.decide(Lost(kind="died", cause=cause, slot=None)).action == "restart"

    def note_progress(self) -> None:
        """Called after an answer or a checkpoint; resets the failure counts."""
        self.used = 0
        self.failures.clear()
        self.retired.clear()

    def count_anew(self) -> None:
        """Resets failure counts for the next group, which has other slots."""
        self.used = self.num_here = 0

    def grow(self) -> None:
        """Starts a new generation for returned slots, without counting a failure."""
        self.count_anew()
        self.generation += 1

    def _gone(self, lost: Lost) -> Decision:
        name = "a slot" if lost.slot is None else listed([lost.slot])
        return Decision("regroup", f"{name} is lost, the others train without it")

    def _failed(self, lost: Lost) -> Decision:
        digest = digest_of(lost.cause) if lost.kind == "raised" else ""
        is_repeated = self._count(lost, digest)
        first = self.raised.get(digest)
        if is_repeated and (self.slot_failures is None or first != lost.slot):
            return self._code_is_at_fault(lost.slot, first)
        if self._is_slot_at_fault(lost, is_repeated or self._is_looping):
            return self._retire(lost)
        if is_repeated:
            return self._code_is_at_fault(lost.slot, first)
        if self._is_looping or self._is_step_at_fault(lost):
            return self._step_is_at_fault()
        return self._restart(lost)

    def _count(self, lost: Lost, digest: str) -> bool:
        """Counts the loss; returns whether the same exception occurred at this step before."""
        if lost.newest > self.newest:
            self.note_progress()
        if lost.step != self.step:
            self.num_here = self.num_in_all = 0
            self.slots_here.clear()
            self.raised.clear()
        self.newest, self.step = lost.newest, lost.step
        self.num_here += 1
        self.num_in_all += 1
        if lost.slot is not None:
            self.failures[lost.slot] += 1
            self.slots_here[lost.slot] = None
        is_repeated = digest in self.raised
        if digest and not is_repeated:
            self.raised[digest] = lost.slot
        return is_repeated

    @property
    def _is_looping(self) -> bool:
        return self.step is not None and self.num_here >= SAME_STEP

    def _is_slot_at_fault(self, lost: Lost, is_proven: bool) -> bool:
        if self.slot_failures is None or lost.slot is None or self._is_step_at_fault(lost):
            return False
        is_often = self.failures[lost.slot] >= self.slot_failures
        # If the others are too few, the group would wait: not for a possible error of the code.
        return (is_proven or is_often) if lost.can_shrink else is_often and lost.kind != "raised"

    def _is_step_at_fault(self, lost: Lost) -> bool:
        """Whether too many slots failed at one step for the slots to be the cause."""
        if self.slot_failures is None or lost.slot is None:
            return False
        is_often = self.failures[lost.slot] >= self.slot_failures or self._is_looping
        most = SAME_STEP if lost.can_shrink else SAME_STEP - 1
        return is_often and len(self.slots_here) >= most

    def _retire(self, lost: Lost) -> Decision:
        assert lost.slot is not None, "a slot is at fault"
        count = self.failures.pop(lost.slot)
        self.retired.append(lost.slot)
        times = "once" if count == 1 else f"{count} times in a row"
        return Decision("retire", f"its process failed {times}, the last time: {lost.cause}")

    def _restart(self, lost: Lost) -> Decision:
        if self.used >= self.retries:
            why = f"{self.used} tries without a new step: {NOT_AGAIN}" if self.retries else ""
            return Decision("stop", why)
        self.used += 1
        place = f"after step {lost.newest + 1}" if lost.newest >= 0 else "from the beginning"
        count = f"try {self.used} of recover.retries = {self.retries} without a new step"
        return Decision("restart", f"it is started again {place} ({count})")

    def _code_is_at_fault(self, slot: int | None, first: int | None) -> Decision:
        if first == slot or first is None or slot is None or self.slot_failures is None:
            why = f"the try before ended at the same step in the same way: {NOT_AGAIN}"
            return Decision("stop", why, give_back=tuple(self.retired))
        both = listed(sorted((first, slot)))
        diagnosis = (
            f"{self._place} failed with the same error on {both}, so its data or computation "
            "is the likely cause and not a device, and the run is not started again"
        )
        why = f"the same error came on {both}: {NOT_AGAIN}"
        return Decision("stop", why, diagnosis, tuple(self.retired))

    def _step_is_at_fault(self) -> Decision:
        on = f" on {listed(sorted(self.slots_here))}" if len(self.slots_here) > 1 else ""
        failed = f"{self._place} failed {self.num_in_all} times in a row{on}"
        diagnosis = (
            f"{failed}, so its data or computation is the likely cause, and the run is not "
            "started again"
        )
        return Decision("stop", f"{failed}: {NOT_AGAIN}", diagnosis, tuple(self.retired))

    @property
    def _place(self) -> str:
        return "the start of the ranks" if self.step is None else f"step {self.step}"


def digest_of(cause: str) -> str:
    """Identifies an exception on any rank: without ranks, addresses, sizes and devices."""
    words = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "", cause)
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


_generation = 0


@contextmanager
def in_generation(number: int) -> Iterator[None]:
    """While active, this process belongs to the given generation of learners."""
    global _generation
    before, _generation = _generation, number
    try:
        yield
    finally:
        _generation = before


def is_restart() -> bool:
    """Whether the run of this process was restarted after a failure."""
    return _generation > 0
