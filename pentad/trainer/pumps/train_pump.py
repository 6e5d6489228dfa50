"""Moves sampled groups to the learner and its weights to the samplers: the groups of a batch are
leased, trained and acknowledged; the publish pump installs a snapshot, then evaluates it if due."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from pentad.core.errors import InfraFailure, RunError
from pentad.core.types import Group
from pentad.runtime.learner_client import LearnerClient
from pentad.sync.publisher import Publisher, Snapshot
from pentad.telemetry.record import PhaseTimer
from pentad.telemetry.timeline import timeline
from pentad.trainer.pumps.state import RunState
from pentad.trainer.rank.update import BatchFacts, chunk_slots
from pentad.trainer.records import TrainedBatch
from pentad.trainer.sampling.evaluate import Evaluator
from pentad.trainer.sampling.placement import DeviceTurns
from pentad.trainer.sampling.selftest import Prober


@dataclass(eq=False)
class PublishPump:
    """Publishes snapshots; a newer snapshot replaces one that is not being sent yet.

    No publish starts during an evaluation, so it uses one version. On-policy, admission also waits,
    so that nothing else is decoded at the same time.
    """

    state: RunState
    publisher: Publisher
    evaluator: Evaluator | None
    device_turns: DeviceTurns
    prober: Prober | None = None
    find_cause: Callable[[], Awaitable[None]] | None = None
    """Raises the failure that ended the learner, which may be the cause of a failed publish."""
    is_probing: bool = False
    """Whether samplers are, or have just been, compared with the version being published."""
    pending: Snapshot | None = None
    is_closed: bool = False

    async def submit(self, snapshot: Snapshot, timer: PhaseTimer) -> None:
        """Publishes the snapshot of a step. Returns at once, or, if roles take turns, when the
        samplers have the version."""
        state, version, self.pending = self.state, snapshot.version, snapshot
        del snapshot  # a whole model
        with timer.phase("publish"):
            self.is_probing = self.prober is not None and self.prober.is_due(version)
            state.changed.notify()
            if self.device_turns.placement.takes_turns:
                await state.changed.until(lambda: state.budget.published >= version)
            state.changed.notify()

    def close(self) -> None:
        """Accepts no more snapshots; a pending one is still published."""
        self.is_closed = True
        self.state.changed.notify()

    async def run(self) -> None:
        while True:
            await self.state.changed.until(lambda: self.pending is not None or self.is_closed)
            if self.pending is None:
                return
            snapshot, self.pending = self.pending, None
            await self._publish(snapshot)
            del snapshot  # frees a whole model before waiting

    async def _publish(self, snapshot: Snapshot) -> None:
        await self.device_turns.enter("rollout")
        what = f"version {snapshot.version}"
        with self.state.doing(f"publishing {what}"), timeline.span("publish", what):
            try:
                await self.publisher.publish(snapshot)
            except (RunError, InfraFailure):
                if self.find_cause is not None:
                    await self.find_cause()
                raise
        if not self.state.budget.is_on_policy:
            self._count(snapshot.version)
        if self.prober is not None and self.is_probing:
            await self.prober.probe(snapshot.version)
            self.is_probing = False
            self.state.changed.notify()
        if self.evaluator is not None and self.evaluator.is_due(snapshot.version):
            with self.state.doing(f"evaluation of {what}"), timeline.span("evaluation", what):
                await self.evaluator.evaluate(snapshot.version)
        if self.state.budget.is_on_policy:
            self._count(snapshot.version)

    def _count(self, version: int) -> None:
        self.state.budget.count_published(version)
        self.state.changed.notify()


@dataclass(eq=False)
class BatchTrainer:
    """Leases the groups of a batch once they are ready, has the learner train them, and
    acknowledges them once the weights contain them."""

    state: RunState
    learner: LearnerClient
    publish: PublishPump
    device_turns: DeviceTurns
    num_chunks: int

    async def train(self, batch: int, timer: PhaseTimer) -> TrainedBatch | None:
        """Trains a batch; None if the run was stopped before the batch was complete."""
        groups: list[Group] = []
        with self.state.doing(f"the start of step {batch + 1}"):
            await self.learner.call("begin", batch=batch)
        async for chunk in self._chunks(batch, timer):
            groups += chunk
            last = len(groups) == self.state.budget.groups_per_batch
            await self.device_turns.enter("actor")
            with timer.phase("train"), self.state.doing(f"training of step {batch + 1}"):
                await self._add(chunk, last)
        if len(groups) < self.state.budget.groups_per_batch:
            self.state.ledger.release([group.gid for group in groups])
            return None
        with timer.phase("publish"):
            # Until then the learner must keep the weights that samplers are compared with.
            what = "the samplers to be compared with the trainer"
            await self.state.wait_for("train", what, lambda: not self.publish.is_probing)
        with timer.phase("train"), self.state.doing(f"the update of step {batch + 1}"):
            facts = await self.learner.run(lambda: self._finish(timer))
        gids = [group.gid for group in groups]
        self.state.ledger.ack(gids)
        self.state.drop(gids)
        state = self.state
        oversampled, state.oversampled = state.oversampled, None
        return TrainedBatch(
            *(batch, facts, timer, groups, state.ledger.funnel(), state.progress()),
            oversampled=oversampled,
        )

    async def _add(self, groups: list[Group], last: bool) -> None:
        """Adds groups; every rank reads them from the store."""
        gids = [group.gid for group in groups]
        async with self.state.kept(gids):
            await self.learner.call("add", gids=gids, last=last)

    def _finish(self, timer: PhaseTimer) -> BatchFacts:
        """Finishes the step and records it without an interruption in between: every step in the
        weights is recorded. Metrics follow with the record, while the next batch is sampled."""
        self.learner.call_all("finish")
        with timer.phase("record"):
            return BatchFacts.read(self.learner.query("measure", metrics=False))

    async def _chunks(self, batch: int, timer: PhaseTimer) -> AsyncIterator[list[Group]]:
        """Yields the batch's groups in slot order, each chunk as soon as it is ready."""
        ledger, size = self.state.ledger, self.state.budget.groups_per_batch
        for chunk, slots in enumerate(chunk_slots(size, self.num_chunks)):
            # Sleeping samplers finish no groups: the trainer waits for the whole batch.
            awaited = range(size) if self.device_turns.alternates and chunk == 0 else slots
            what = f"groups {awaited.start} to {awaited.stop - 1} of batch {batch}"
            are_ready = partial(ledger.are_ready, batch, awaited)
            with timer.phase("rollout"):
                await self.state.wait_for("train", what, are_ready)
            if not are_ready():
                return
            groups = self.state.lease(batch, slots)
            for group in groups:
                self._check_lag(batch, group)
            yield groups

    def _check_lag(self, batch: int, group: Group) -> None:
        """Checks the staleness bound on the groups that are trained."""
        lag = batch - group.min_version
        if lag > (most := self.state.budget.max_lag):
            raise RunError(
                f"group {group.gid} holds tokens of version {group.min_version} but is trained at "
                f"version {batch}: lag {lag} exceeds max_staleness + rollout.max_carries = {most}"
            )
