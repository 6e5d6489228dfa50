"""Who belongs to the group of ranks that trains: slots that are lost for good, and that return.

The group shrinks, grows, or waits where too few are left. The rules are those of `core.shrink`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pentad.config.derived import component_of
from pentad.config.rules.elastic import Fitted, fit_world
from pentad.config.schema import Config
from pentad.core.errors import RunError
from pentad.runtime.report import Failure
from pentad.runtime.slots import GroupNow, Slots, listed, reasons
from pentad.telemetry.log import NOTICE

log = logging.getLogger(__name__)

POLL_S, SAY_S = 0.2, 30.0


@dataclass(frozen=True, slots=True)
class Formed:
    """One generation of the group."""

    config: Config
    """With the layout of these ranks."""
    used: tuple[int, ...]
    """The slot of each rank."""


@dataclass(slots=True)
class Membership:
    config: Config
    """As it was asked for."""
    slots: Slots
    newest_step: Callable[[], int]
    """Of the newest checkpoint; failures before it are forgotten."""
    lacks: Callable[[int], str | None] = lambda slot: None
    """Why the runtime has no place for a slot."""
    formed: Formed | None = None
    failures: Counter[int] = field(default_factory=Counter)
    """In a row, by slot."""
    step: int = -1
    """Of the newest checkpoint when they were counted."""
    retired: list[int] = field(default_factory=list)
    """Since that checkpoint."""
    missed_at: dict[int, float] = field(default_factory=dict)
    """Since when a slot has been away."""

    @property
    def is_on(self) -> bool:
        return self.config.elastic.enabled

    @property
    def count(self) -> int:
        return component_of(self.config, "actor").world

    def away(self, slots: Iterable[int] | None = None) -> dict[int, str]:
        """Of these slots, or of all, those that cannot be used, with the reason."""
        if not self.is_on:
            return {}
        found = self.slots.away()
        wanted = range(self.count) if slots is None else slots
        reasons = {slot: found.get(slot) or self.lacks(slot) for slot in wanted}
        return {slot: why for slot, why in reasons.items() if why}

    def form(self, generation: int) -> Formed:
        """The largest group that can be had; waits while it is too small. RunError where that takes
        longer than `elastic.wait_timeout_s`."""
        if not self.is_on:
            return Formed(self.config, tuple(range(self.count)))
        began, said_at = time.monotonic(), -SAY_S
        while True:
            away, now = self.away(), time.monotonic()
            self.missed_at = {slot: self.missed_at.get(slot, now) for slot in away}
            present = [slot for slot in range(self.count) if slot not in away]
            if (fitted := self._fitted(present)) and not self._is_graced(now):
                return self._settle(fitted, present, generation)
            waited = now - began
            if waited > self.config.elastic.wait_timeout_s:
                raise RunError(f"{self._lack(present, away)}: waited {waited:.0f} s, the run ends")
            if waited - said_at >= SAY_S:
                said_at = waited
                limit = self.config.elastic.wait_timeout_s
                text = "elastic: waiting for ranks, %.0f s of at most %g: %s"
                log.warning(text, waited, limit, self._lack(present, away))
            time.sleep(POLL_S)

    def _fitted(self, present: list[int]) -> Fitted | None:
        found = fit_world(self.config, len(present)) if present else None
        return found if found and found.world >= self.config.elastic.min_ranks else None

    def _is_graced(self, now: float) -> bool:
        """Whether a slot that is away may still return before the others go on without it."""
        grace_s = self.config.elastic.drop_grace_s
        return any(now - at < grace_s for at in self.missed_at.values())

    def _lack(self, present: list[int], away: dict[int, str]) -> str:
        least = self.config.elastic.min_ranks
        return (
            f"{len(present)} of {self.count} slots are there, elastic.min_ranks = {least} "
            f"({reasons(away)})"
        )

    def _settle(self, fitted: Fitted, present: list[int], generation: int) -> Formed:
        before = len(self.formed.used) if self.formed else self.count
        self.formed = Formed(fitted.config, tuple(present[: fitted.world]))
        layout = str(component_of(fitted.config, "actor"))
        if fitted.why or fitted.world != before:
            what = fitted.why or f"{layout} on all {self.count} slots"
            text = "elastic: generation %d has %d ranks: %s"
            log.info(text, generation, fitted.world, what, extra=NOTICE)
        self.slots.write_now(GroupNow(self.count, self.formed.used, generation, layout))
        return self.formed

    def has_returned(self) -> bool:
        """Whether a larger group could be formed than the one that trains."""
        if not self.is_on or self.formed is None or len(self.formed.used) == self.count:
            return False
        away = self.away()
        if any(slot in away for slot in self.formed.used):  # its loss comes first
            return False
        present = self.count - len(away)
        if present <= len(self.formed.used):
            return False
        fitted = fit_world(self.config, present)
        return fitted is not None and fitted.world > len(self.formed.used)

    def why_away(self, rank: int) -> str | None:
        """Of the group that trains, by rank."""
        if not self.is_on or self.formed is None:
            return None
        slot = self.formed.used[rank]
        return self.slots.away().get(slot)

    def forgive(self) -> None:
        """A step is the cause of what slots were retired for since the newest checkpoint."""
        for slot in self.retired:
            self.slots.join(slot)
        self.retired.clear()

    def note_failure(self, cause: Failure | None) -> bool:
        """Counts it against the slot of the rank that caused it. Whether the group is another one
        from now on, so that it is no try of the same one again."""
        if not self.is_on or self.formed is None or cause is None:
            return False
        newest = self.newest_step()
        if newest > self.step:
            self.failures.clear()
            self.retired.clear()
        self.step, slot = newest, self.formed.used[cause.rank]
        if cause.kind == "away":
            log.warning("elastic: %s is lost: %s", listed([slot]), cause.message)
            return True
        if cause.kind not in ("died", "stuck"):
            return False
        if why := self.lacks(slot):  # whoever takes its place has not failed yet
            log.warning("elastic: %s is lost: %s", listed([slot]), why)
            return True
        self.failures[slot] += 1
        count, limit = self.failures[slot], self.config.elastic.slot_failures
        if count < limit:
            return False
        why = f"its process failed {count} times in a row, the last time: {cause.message}"
        self.slots.drop(slot, why)
        del self.failures[slot]
        self.retired.append(slot)
        text = "elastic: %s is retired: %s; `pentad slots %s --join %d` brings it back"
        log.warning(text, listed([slot]), why, self.slots.folder.parent, slot)
        return True
