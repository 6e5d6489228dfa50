"""The score pump: sends sampled groups to the scorers; with all their columns they are ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import islice

from pentad.core.types import Group
from pentad.data.store import MissingGroups
from pentad.trainer.placement import Placement
from pentad.trainer.scorers import ScorerCalls
from pentad.trainer.state import RunState
from pentad.trainer.update import chunk_slots, column_of


class ScorePump:
    """Scorers work at the same time, each on the same groups.

    On-policy the groups of a chunk are scored together, as a learner with weight tags does: what is
    computed in one batch, and so every bit of the run, is then a function of the data alone.
    Otherwise the oldest groups that are there are scored at once.
    """

    def __init__(
        self,
        state: RunState,
        scorers: Mapping[str, ScorerCalls],
        placement: Placement,
        *,
        num_chunks: int,
        is_open: Callable[[int], bool] | None = None,
    ) -> None:
        """`is_open`: whether scorers hold the weights that judge a batch; None: always."""
        self.state = state
        self.scorers = scorers
        """By role."""
        self.is_open = is_open or (lambda batch: True)
        self.columns = [column_of(role) for role in scorers]
        self.in_chunks = placement.is_on_policy
        self.chunks = chunk_slots(state.budget.groups_per_batch, num_chunks)

    async def run(self) -> None:
        while not self.state.is_over:
            if gids := self._next_groups():
                await self._score(gids)
            else:
                await self.state.wait_for(
                    "score", "sampled groups", lambda: bool(self._next_groups())
                )

    def _next_groups(self) -> list[int]:
        ledger = self.state.ledger
        if not ledger.num_sampled:
            return []
        if not self.in_chunks:
            sampled = ledger.gids_in("sampled")
            judged = (gid for gid in sampled if self.is_open(ledger.batch_of(gid)))
            return list(islice(judged, max(map(len, self.chunks))))
        batch = self.state.budget.trained  # without staleness no other is open
        if not self.is_open(batch):
            return []
        for slots in self.chunks:
            # One that the store lost is scored together with those that were ready beside it.
            gids = ledger.gids_at(batch, slots, "sampled", "ready")
            if len(gids) == len(slots) and ledger.gids_at(batch, slots, "sampled"):
                return gids
        return []

    async def _score(self, gids: list[int]) -> None:
        groups = self._read(gids)
        if not groups:
            return
        keeping = asyncio.ensure_future(self.state.keep(groups))
        try:
            with self.state.doing(f"the scores of {len(gids)} groups, from gid {gids[0]} on,"):
                await asyncio.gather(
                    *(one.call("score", gids=gids) for one in self.scorers.values())
                )
        finally:
            keeping.cancel()
        for group in self._read(gids):  # what was lost meanwhile was put again without its columns
            if all(column in one.columns for one in group.samples for column in self.columns):
                self.state.ledger.score(group.gid, group.attempt)
        self.state.changed.notify()

    def _read(self, gids: list[int]) -> list[Group]:
        """The groups; none where the store has lost some, which are planned again."""
        try:
            return self.state.store.get(gids)
        except MissingGroups:
            if not self.state.store.can_lose:
                raise
        self.state.plan_lost("sampled")
        return []
