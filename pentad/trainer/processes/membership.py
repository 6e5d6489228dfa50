"""Membership of elastic runs: assigns training ranks to the slots that are currently usable.

The group shrinks, grows, or waits if too few slots are left. `core.shrink` has the rules;
`runtime.restarts` decides which slot is retired.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pentad.config.rules.elastic import Fitted, fit_world
from pentad.config.schema import Config
from pentad.core.errors import RunError
from pentad.runtime.report import Failure
from pentad.runtime.restarts import Decision, LossKind, Lost
from pentad.runtime.slots import GroupNow, Slots, listed, reasons
from pentad.telemetry.log import NOTICE

log = logging.getLogger(__name__)

POLL_S, SAY_S = 0.2, 30.0
KINDS: dict[str, LossKind] = {
    **{"died": "died", "stuck": "stuck", "away": "away"},
    **dict.fromkeys(("bug", "run", "user"), "raised"),
}
"""The restart policy's names for kinds of rank failures."""


@dataclass(frozen=True, slots=True)
class RankGeneration:
    """One generation of the training group."""

    config: Config
    """The config with the layout of these ranks."""
    used: tuple[int, ...]
    """The slot of each rank."""


@dataclass(slots=True)
class Membership:
    config: Config
    """The config as requested, before any shrinking."""
    slots: Slots
    why_unavailable: Callable[[int], str | None] = lambda slot: None
    """Returns why the runtime cannot place a process in a slot."""
    is_launched: bool = False
    """Whether the launcher of the ranks decides which slots are used."""
    current: RankGeneration | None = None
    missed_at: dict[int, float] = field(default_factory=dict)
    """Time at which each missing slot was first missed."""

    @property
    def is_on(self) -> bool:
        return self.config.elastic.enabled and not self.is_launched

    @property
    def count(self) -> int:
        return self.config.component("actor").world

    def away(self, slots: Iterable[int] | None = None) -> dict[int, str]:
        """Returns the unusable slots among `slots` (None: all), with the reason."""
        if not self.is_on:
            return {}
        found = self.slots.away()
        wanted = range(self.count) if slots is None else slots
        reasons = {slot: found.get(slot) or self.why_unavailable(slot) for slot in wanted}
        return {slot: why for slot, why in reasons.items() if why}

    def form(self, generation: int) -> RankGeneration:
        """Forms the largest possible group; waits while too few slots are usable. Raises RunError
        after `elastic.wait_timeout_s`."""
        if not self.is_on:
            return RankGeneration(self.config, tuple(range(self.count)))
        began, said_at = time.monotonic(), -SAY_S
        while True:
            away, now = self.away(), time.monotonic()
            self.missed_at = {slot: self.missed_at.get(slot, now) for slot in away}
            present = [slot for slot in range(self.count) if slot not in away]
            if (fitted := self._fitted(present)) and not self._is_graced(now):
                return self._form(fitted, present, generation)
            waited = now - began
            if waited > self.config.elastic.wait_timeout_s:
                raise RunError(
                    f"{self._too_few(present, away)}: waited {waited:.0f} s, the run ends"
                )
            if waited - said_at >= SAY_S:
                said_at = waited
                limit = self.config.elastic.wait_timeout_s
                text = "elastic: waiting for ranks, %.0f s of at most %g: %s"
                log.warning(text, waited, limit, self._too_few(present, away))
            time.sleep(POLL_S)

    def _fitted(self, present: list[int]) -> Fitted | None:
        found = fit_world(self.config, len(present)) if present else None
        return found if found and found.world >= self.config.elastic.min_ranks else None

    def _is_graced(self, now: float) -> bool:
        """Whether the others still wait for a missing slot, before they train without it."""
        grace_s = self.config.elastic.drop_grace_s
        return any(now - at < grace_s for at in self.missed_at.values())

    def _too_few(self, present: list[int], away: dict[int, str]) -> str:
        least = self.config.elastic.min_ranks
        return (
            f"{len(present)} of {self.count} slots are available, elastic.min_ranks = {least} "
            f"({reasons(away)})"
        )

    def _form(self, fitted: Fitted, present: list[int], generation: int) -> RankGeneration:
        before = len(self.current.used) if self.current else self.count
        # A config of one rank would mean a one-process run; this run has processes.
        processes = fitted.config.scheduler.model_copy(update={"processes": "separate"})
        config = fitted.config.model_copy(update={"scheduler": processes})
        self.current = RankGeneration(config, tuple(present[: fitted.world]))
        layout = str(fitted.config.component("actor"))
        if fitted.why or fitted.world != before:
            what = fitted.why or f"{layout} on all {self.count} slots"
            text = "elastic: generation %d has %d ranks: %s"
            log.info(text, generation, fitted.world, what, extra=NOTICE)
        self.slots.write_now(GroupNow(self.count, self.current.used, generation, layout))
        return self.current

    def has_returned(self) -> bool:
        """Whether a larger group than the current one could be formed."""
        if not self.is_on or self.current is None or len(self.current.used) == self.count:
            return False
        away = self.away()
        if any(slot in away for slot in self.current.used):  # handle its loss first
            return False
        present = self.count - len(away)
        if present <= len(self.current.used):
            return False
        fitted = fit_world(self.config, present)
        return fitted is not None and fitted.world > len(self.current.used)

    def why_away(self, rank: int) -> str | None:
        """Returns why the slot of this rank is unusable; None if it is usable."""
        if not self.is_on or self.current is None:
            return None
        slot = self.current.used[rank]
        return self.slots.away().get(slot)

    def lost(self, cause: Failure, *, step: int | None, newest: int) -> Lost:
        """Returns the loss for the restart policy. A failure caused by the loss of another rank
        belongs to no slot."""
        found = Lost(
            kind=KINDS[cause.kind], cause=cause.message, slot=cause.rank, step=step, newest=newest
        )
        if cause.is_consequence and cause.kind != "away":
            return replace(found, kind="died", slot=None)
        if not self.is_on or self.current is None:
            return found
        slot, kind = self.current.used[cause.rank], found.kind
        if kind != "away" and self.why_unavailable(slot):  # its process cannot be restarted there
            kind = "away"
        away = self.away()
        left = [one for one in range(self.count) if one != slot and one not in away]
        can_shrink = self._fitted(left) is not None
        return replace(found, kind=kind, slot=slot, can_shrink=can_shrink)

    def carry_out(self, decision: Decision, lost: Lost) -> None:
        """Retires slots as the restart policy decided, and reinstates wrongly retired ones."""
        for slot in decision.give_back if self.is_on else ():
            self.slots.join(slot)
        if decision.action == "regroup" and lost.slot is not None:
            why = self.why_unavailable(lost.slot) or lost.cause
            log.warning("elastic: %s is lost: %s", listed([lost.slot]), why)
        if decision.action == "retire":
            assert lost.slot is not None, "a slot is retired"
            self.slots.drop(lost.slot, decision.why)
            text = "elastic: %s is retired: %s; `pentad slots %s --join %d` brings it back"
            folder, name = self.slots.folder.parent, listed([lost.slot])
            log.warning(text, name, decision.why, folder, lost.slot)
