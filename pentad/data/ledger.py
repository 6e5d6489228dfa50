"""The ledger: the state of every group of the run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal

LiveState = Literal["planned", "running", "sampled", "ready", "leased"]


class LedgerError(RuntimeError):
    """An invalid transition, which is a programming error of the caller."""


@dataclass(frozen=True, slots=True)
class PromptFunnel:
    """Counts of all prompts drawn so far: drawn = trained + sum of dropped + in_flight."""

    drawn: int
    trained: int
    dropped: dict[str, int]
    in_flight: int


@dataclass(slots=True)
class _Entry:
    batch: int
    slot: int
    state: LiveState
    num_attempts: int = 0
    num_carries: int = 0
    """How often the group was aborted, to continue in a later step."""


@dataclass(slots=True)
class _Batch:
    """A batch with groups that are not trained yet."""

    free: list[int]
    """A heap of the free slots."""
    slots: dict[int, int] = field(default_factory=dict)
    """Slot -> gid, for live and done groups."""
    num_drawn: int = 0
    num_done: int = 0


class Ledger:
    def __init__(self, groups_per_batch: int, *, has_scorers: bool = False) -> None:
        assert groups_per_batch > 0, "a batch holds at least one group"
        self.groups_per_batch = groups_per_batch
        self.has_scorers = has_scorers
        self.next_gid = 0
        self._live: dict[int, _Entry] = {}
        """Live groups in gid order: they are added in this order and never moved."""
        self._batches: dict[int, _Batch] = {}
        """Batches in order, without gaps; fully trained ones are removed."""
        self._first_batch = 0
        """All batches below this number are fully trained."""
        self._next_open = 0
        """No batch below this number has a free slot."""
        self._trained = 0
        self._dropped: dict[str, int] = {}
        self.num_sampled = 0
        """Number of groups that wait for their scores."""

    # -- planning -------------------------------------------------------------------------------

    def admit(self, batch: int) -> int:
        """Draws the next ordinal of the prompt stream into the lowest free slot of the batch."""
        if not self.num_missing(batch):
            raise LedgerError(f"batch {batch} takes no more groups: all its slots are in use")
        older = self.next_batch
        if batch > older:
            raise LedgerError(
                f"batch {batch} cannot take a group while batch {older} has "
                f"{self.num_missing(older)} free slots: batches are filled oldest first"
            )
        gid = self.next_gid
        self.next_gid += 1
        self._live[gid] = _Entry(*self._take_slot(batch, gid), "planned")
        self._batches[batch].num_drawn += 1
        return gid

    def start(self, gid: int) -> int:
        """Starts an attempt at the group; returns its number."""
        entry = self._expect(gid, "start", "planned")
        entry.state = "running"
        entry.num_attempts += 1
        return entry.num_attempts - 1

    def is_current(self, gid: int, attempt: int) -> bool:
        """Whether a commit of this attempt would be accepted now."""
        entry = self._live.get(gid)
        return entry is not None and entry.state == "running" and attempt == entry.num_attempts - 1

    def commit(self, gid: int, attempt: int) -> bool:
        """Records that the samples are stored. False, with no change, if the attempt is over."""
        self._check_begun(gid, attempt, "commit")
        if not self.is_current(gid, attempt):
            return False
        self._live[gid].state = "sampled" if self.has_scorers else "ready"
        self.num_sampled += self.has_scorers
        return True

    def score(self, gid: int, attempt: int) -> bool:
        """Marks a group as scored: all columns are in the store. Returns False, without a change,
        if the attempt is over."""
        self._check_begun(gid, attempt, "score")
        entry = self._live.get(gid)
        if entry is None or entry.state != "sampled" or attempt < entry.num_attempts - 1:
            return False
        entry.state = "ready"
        self.num_sampled -= 1
        return True

    def carry(self, gid: int, attempt: int) -> None:
        """Records that the attempt was aborted; it continues later as the same attempt."""
        entry = self._expect(gid, "carry", "running")
        if attempt < entry.num_attempts - 1:
            raise LedgerError(f"group {gid} cannot carry attempt {attempt}: it is over")
        entry.state = "planned"
        entry.num_attempts -= 1
        entry.num_carries += 1

    def reseat(self, gids: Sequence[int]) -> None:
        """Moves planned or running groups to the oldest free slots (their own included), in the
        given order."""
        entries = [self._expect(gid, "reseat", "planned", "running") for gid in gids]
        for entry in entries:
            self._vacate(entry)
        for gid, entry in zip(gids, entries, strict=True):
            entry.batch, entry.slot = self._take_slot(self.next_batch, gid)

    def drop(self, gid: int, reason: str) -> None:
        """Drops the group without training; its slot becomes free for the next ordinal."""
        if not reason:
            raise LedgerError(f"group {gid} cannot be dropped without a reason")
        entry = self._expect(gid, "drop", "planned", "running", "sampled", "ready", "leased")
        del self._live[gid]
        self.num_sampled -= entry.state == "sampled"
        self._vacate(entry)
        self._dropped[reason] = self._dropped.get(reason, 0) + 1

    # -- training -------------------------------------------------------------------------------

    def lease(self, batch: int, slots: Iterable[int] | None = None) -> list[int]:
        """Leases the ready groups in these slots (default: all); returns gids in slot order."""
        wanted = self.gids_at(batch, self._all_slots if slots is None else slots, "ready")
        for gid in wanted:
            self._live[gid].state = "leased"
        return wanted

    def ack(self, gids: Iterable[int]) -> None:
        """Acknowledges the optimizer step that trained these groups; on error, none is changed."""
        gids = self._all_leased(gids, "ack")
        for gid in gids:
            entry = self._live.pop(gid)
            self._batches[entry.batch].num_done += 1
        self._trained += len(gids)
        while self._first_batch in self._batches:
            if self._batches[self._first_batch].num_done < self.groups_per_batch:
                break
            del self._batches[self._first_batch]
            self._first_batch += 1

    def release(self, gids: Iterable[int]) -> None:
        """Returns leased groups untrained: they are ready again."""
        for gid in self._all_leased(gids, "release"):
            self._live[gid].state = "ready"

    # -- questions ------------------------------------------------------------------------------

    @property
    def next_batch(self) -> int:
        """The oldest batch with a free slot."""
        self._next_open = max(self._next_open, self._first_batch)
        while not self.num_missing(self._next_open):
            self._next_open += 1
        return self._next_open

    def num_missing(self, batch: int) -> int:
        """Number of free slots of the batch."""
        if batch < self._first_batch:
            return 0
        return self.groups_per_batch - len(self._batches.get(batch, _NO_BATCH).slots)

    def num_drawn(self, batch: int) -> int:
        """Number of ordinals assigned to the batch, dropped ones included; 0 once it is trained."""
        return self._batches.get(batch, _NO_BATCH).num_drawn

    def are_ready(self, batch: int, slots: Iterable[int] | None = None) -> bool:
        """Whether every one of these slots (default: all) holds a ready group."""
        held, live = self._batches.get(batch, _NO_BATCH).slots, self._live
        for slot in self._all_slots if slots is None else slots:  # called for every finished group
            if slot not in held or held[slot] not in live or live[held[slot]].state != "ready":
                return False
        return True

    def gids_at(self, batch: int, slots: Iterable[int], *states: LiveState) -> list[int]:
        """The groups in these slots that are in one of the states, in slot order."""
        held = self._batches.get(batch, _NO_BATCH).slots
        gids = [held[slot] for slot in sorted(slots) if slot in held]
        return [gid for gid in gids if gid in self._live and self._live[gid].state in states]

    def gids_in(self, state: LiveState) -> list[int]:
        """All groups in one state, in gid order."""
        return [gid for gid, entry in self._live.items() if entry.state == state]

    def batch_of(self, gid: int) -> int:
        """The batch of a live group."""
        return self._live[gid].batch

    def num_carries(self, gid: int) -> int:
        """How often a live group was aborted."""
        return self._live[gid].num_carries

    def funnel(self) -> PromptFunnel:
        return PromptFunnel(self.next_gid, self._trained, dict(self._dropped), len(self._live))

    # -- checkpoint -----------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """The whole state as JSON values; consistent at any time between two events."""
        return {
            "groups_per_batch": self.groups_per_batch,
            "next_gid": self.next_gid,
            "first_batch": self._first_batch,
            "trained": self._trained,
            "dropped": dict(self._dropped),
            "batches": [
                {
                    "batch": number,
                    "num_drawn": batch.num_drawn,
                    "done": [[s, gid] for s, gid in batch.slots.items() if gid not in self._live],
                }
                for number, batch in self._batches.items()
            ],
            "live": [  # short, since there is one after every step
                [gid, entry.batch, entry.slot, entry.state, entry.num_attempts, entry.num_carries]
                for gid, entry in self._live.items()
            ],
        }

    @classmethod
    def restore(
        cls, snapshot: Mapping[str, Any], available: Collection[int], *, has_scorers: bool = False
    ) -> Ledger:
        """Restores a snapshot. Groups in `available` have samples in the store and are scored
        again. LookupError, TypeError or ValueError for an invalid snapshot."""
        ledger = cls(int(snapshot["groups_per_batch"]), has_scorers=has_scorers)
        ledger.next_gid = int(snapshot["next_gid"])
        ledger._first_batch = int(snapshot["first_batch"])
        ledger._trained = int(snapshot["trained"])
        ledger._dropped = {reason: int(count) for reason, count in snapshot["dropped"].items()}
        for saved in snapshot["batches"]:
            done = {int(slot): int(gid) for slot, gid in saved["done"]}
            ledger._batches[int(saved["batch"])] = _Batch(
                [], done, int(saved["num_drawn"]), len(done)
            )
        for saved in snapshot["live"]:
            gid, batch, slot, state, num_attempts, num_carries = read_live(saved)
            entry = _Entry(batch, slot, state, num_attempts, num_carries)
            if entry.state in ("sampled", "ready", "leased") and gid in available:
                entry.state = "sampled" if has_scorers else "ready"
                ledger.num_sampled += has_scorers
            elif entry.state != "planned":
                entry.state, entry.num_attempts = "planned", num_attempts - 1
            ledger._live[gid] = entry
            ledger._batches[batch].slots[slot] = gid
        for held in ledger._batches.values():
            held.free = [slot for slot in ledger._all_slots if slot not in held.slots]
        return ledger

    # -- inside ---------------------------------------------------------------------------------

    @property
    def _all_slots(self) -> range:
        return range(self.groups_per_batch)

    def _take_slot(self, batch: int, gid: int) -> tuple[int, int]:
        """Assigns the lowest free slot of the batch; returns (batch, slot)."""
        held = self._batches.setdefault(batch, _Batch(list(self._all_slots)))
        slot = heappop(held.free)
        held.slots[slot] = gid
        return batch, slot

    def _vacate(self, entry: _Entry) -> None:
        """Frees the slot of a group."""
        batch = self._batches[entry.batch]
        del batch.slots[entry.slot]
        heappush(batch.free, entry.slot)
        self._next_open = min(self._next_open, entry.batch)

    def _all_leased(self, gids: Iterable[int], verb: str) -> list[int]:
        """Checks all groups before any is changed, so that a transition applies to all or none."""
        gids = list(gids)
        if len(set(gids)) < len(gids):
            raise LedgerError(f"{verb} names a group twice: {sorted(gids)}")
        for gid in gids:
            self._expect(gid, verb, "leased")
        return gids

    def _expect(self, gid: int, verb: str, *states: LiveState) -> _Entry:
        entry = self._live.get(gid)
        if entry is None:
            known = "has ended" if 0 <= gid < self.next_gid else "was never admitted"
            raise LedgerError(f"group {gid} cannot {verb}: it {known}")
        if entry.state not in states:
            raise LedgerError(
                f"group {gid} of batch {entry.batch} cannot {verb}: it is {entry.state}, not "
                f"{' or '.join(states)}"
            )
        return entry

    def _check_begun(self, gid: int, attempt: int, verb: str) -> None:
        """Raises LedgerError for an attempt that was never started."""
        if not 0 <= gid < self.next_gid:
            raise LedgerError(f"group {gid} cannot {verb}: it was never admitted")
        entry = self._live.get(gid)
        if attempt < 0 or (entry is not None and attempt >= entry.num_attempts):
            raise LedgerError(f"group {gid} cannot {verb} attempt {attempt}: it never began")


def read_live(saved: Sequence[Any]) -> tuple[int, int, int, LiveState, int, int]:
    """Parses (gid, batch, slot, state, attempts, carries) of a live group in a snapshot; old
    snapshots have no carries."""
    gid, batch, slot, state, attempts, *carries = saved
    (num_carries,) = carries or (0,)
    return int(gid), int(batch), int(slot), state, int(attempts), int(num_carries)


_NO_BATCH = _Batch([])
