"""The train pump leases a batch's groups and updates the learner; the publish pump brings the
weights to the samplers, then evaluates them if due."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

from pentad.core.device import settle
from pentad.core.errors import InfraFailure, RunError
from pentad.core.types import Group
from pentad.data.ledger import PromptFunnel
from pentad.rl.bounds import Bounds
from pentad.sync.publisher import Publisher, Snapshot
from pentad.telemetry.record import PhaseTimer
from pentad.trainer.evaluate import Evaluator
from pentad.trainer.learner_thread import LearnerThread
from pentad.trainer.placement import Placement, Turnstile
from pentad.trainer.selftest import Prober
from pentad.trainer.state import DataProgress, RunState
from pentad.trainer.update import BatchFacts, chunk_slots

CAUSE_S, LOOK_S = 5.0, 0.1
"""How long after a failed publish the loss of the learner may take to be known."""


@dataclass(eq=False)
class PublishPump:
    """Latest wins: a snapshot not yet on its way is replaced by a newer one.

    An evaluation is pinned to one version because no publish starts while it runs. On-policy,
    admission waits for it too, so that nothing else is decoded beside it.
    """

    state: RunState
    publisher: Publisher
    evaluator: Evaluator | None
    placement: Placement
    turnstile: Turnstile
    prober: Prober | None = None
    check: Callable[[], None] | None = None
    """Raises what ended the learner, where that is other processes."""
    is_probing: bool = False
    """Samplers are to be compared with the version on its way, or just are."""
    pending: Snapshot | None = None
    is_closed: bool = False

    def submit(self, snapshot: Snapshot) -> None:
        self.pending = snapshot
        self.is_probing = self.prober is not None and self.prober.is_due(snapshot.version)
        self.state.changed.notify()

    def close(self) -> None:
        """No more snapshots come; what is pending is still published."""
        self.is_closed = True
        self.state.changed.notify()

    async def run(self) -> None:
        while True:
            await self.state.changed.until(lambda: self.pending is not None or self.is_closed)
            if self.pending is None:
                return
            snapshot, self.pending = self.pending, None
            await self._publish(snapshot)
            del snapshot  # a whole model, which must not wait for the next one

    async def _publish(self, snapshot: Snapshot) -> None:
        await self.turnstile.enter("rollout")
        with self.state.doing(f"publishing version {snapshot.version}"):
            try:
                await self.publisher.publish(snapshot)
            except (RunError, InfraFailure):
                await self._look_at_learner()
                raise
        if not self.placement.is_on_policy:
            self._count(snapshot.version)
        if self.prober is not None and self.is_probing:
            await self.prober.probe(snapshot.version)
            self.is_probing = False
            self.state.changed.notify()
        if self.evaluator is not None and self.evaluator.is_due(snapshot.version):
            with self.state.doing(f"evaluation of version {snapshot.version}"):
                await self.evaluator.evaluate(snapshot.version)
        if self.placement.is_on_policy:
            self._count(snapshot.version)

    async def _look_at_learner(self) -> None:
        """One that died while samplers read its weights is the cause of what they say."""
        if (check := self.check) is None:
            return
        for _ in range(round(CAUSE_S / LOOK_S)):
            check()
            await asyncio.sleep(LOOK_S)

    def _count(self, version: int) -> None:
        self.state.budget.count_published(version)
        self.state.changed.notify()


log = logging.getLogger(__name__)


@dataclass(slots=True)
class TrainedBatch:
    """One finished step, for the records."""

    batch: int
    groups: list[Group]
    facts: BatchFacts
    funnel: PromptFunnel
    """As it was when the batch was done; the next one may be under way by now."""
    timer: PhaseTimer
    progress: DataProgress | None
    """Where the data stood when it was done: what belongs to the weights after it."""


@dataclass(eq=False)
class TrainPump:
    state: RunState
    learner: LearnerThread
    take: Callable[[int], Awaitable[Snapshot]]
    """The learner's weights as they are, under the number of a version."""
    publish: PublishPump
    placement: Placement
    turnstile: Turnstile
    _: KW_ONLY
    num_chunks: int
    refresh: Callable[[int], Awaitable[None]]
    """Called with every version, before anything else happens with it."""
    bounds: Bounds
    on_trained: Callable[[TrainedBatch], None]
    """Called as soon as a batch is in the weights."""
    after_step: Callable[[TrainedBatch], None]
    """Called on the learner's thread with the weights of the step still in place."""
    go_back: Callable[[int, str], str]
    """Called there before they are handed on: the step and the sentence that would end the run
    after it, which is returned, or earlier weights are put in place."""
    num_steps: int = 0
    timer: PhaseTimer | None = None
    """Of the step to come, if it has begun."""

    async def run(self) -> None:
        while not self.state.is_over:
            trained = await self._step(self.state.budget.trained)
            self.num_steps += 1
            settle(self.num_steps)
            if trained is not None:
                await self._publish(trained)
        self.publish.close()

    async def _step(self, batch: int) -> TrainedBatch | None:
        """Trains one batch; None when the run was stopped before the batch was whole."""
        timer, self.timer = self.timer or PhaseTimer(), None
        groups: list[Group] = []
        with self.state.doing(f"the start of step {batch + 1}"):
            await self.learner.call("begin", batch=batch)
        async for chunk in self._chunks(batch, timer):
            groups += chunk
            last = len(groups) == self.state.budget.groups_per_batch
            await self.turnstile.enter("actor")
            with timer.phase("train"), self.state.doing(f"training of step {batch + 1}"):
                await self._add(chunk, last)
        if len(groups) < self.state.budget.groups_per_batch:
            self.state.ledger.release([group.gid for group in groups])
            return None
        with timer.phase("publish"):
            # Until then the learner must hold the weights that samplers are compared with.
            what = "the samplers to be compared with the trainer"
            await self.state.wait_for("train", what, lambda: not self.publish.is_probing)
        with timer.phase("train"), self.state.doing(f"the update of step {batch + 1}"):
            facts = await self.learner.run(lambda: self._finish(timer))
        gids = [group.gid for group in groups]
        self.state.ledger.ack(gids)
        self.state.store.delete(gids)
        self.state.num_losses = 0
        funnel, progress = self.state.ledger.funnel(), self.state.progress()
        trained = TrainedBatch(batch, groups, facts, funnel, timer, progress)
        self.on_trained(trained)
        return trained

    async def _add(self, groups: list[Group], last: bool) -> None:
        """Every rank reads them from the store."""
        keeping = asyncio.ensure_future(self.state.keep(groups))
        try:
            await self.learner.call("add", gids=[group.gid for group in groups], last=last)
        finally:
            keeping.cancel()

    def _finish(self, timer: PhaseTimer) -> BatchFacts:
        """The update and what is known of it, in one go: what is in the weights is recorded."""
        calls = self.learner.calls
        calls.call("finish")
        with timer.phase("record"):
            return BatchFacts.read(calls.ask("measure"))

    async def _chunks(self, batch: int, timer: PhaseTimer) -> AsyncIterator[list[Group]]:
        """The batch's groups in slot order, as soon as each chunk of them is ready."""
        ledger, size = self.state.ledger, self.state.budget.groups_per_batch
        for chunk, slots in enumerate(chunk_slots(size, self.num_chunks)):
            # Sleeping samplers finish nothing, so the devices are taken only for a whole batch.
            awaited = range(size) if self.turnstile.alternates and chunk == 0 else slots
            groups = None
            while groups is None:
                with timer.phase("rollout"):
                    await self.state.wait_for(
                        "train",
                        f"groups {awaited.start} to {awaited.stop - 1} of batch {batch}",
                        lambda slots=awaited: ledger.are_ready(batch, slots),  # type: ignore[misc]
                    )
                if not ledger.are_ready(batch, awaited):
                    return
                groups = self.state.lease(batch, slots)
            for group in groups:
                self._check_lag(batch, group)
            yield groups

    def _check_lag(self, batch: int, group: Group) -> None:
        """The promise of the budget, checked on what is really trained."""
        lag = batch - group.min_version
        if lag > self.placement.max_staleness:
            raise RunError(
                f"group {group.gid} holds tokens of version {group.min_version} but is trained at "
                f"version {batch}: lag {lag} exceeds max_staleness = {self.placement.max_staleness}"
            )

    def _past_bounds(self, trained: TrainedBatch) -> str:
        """The sentence that ends a run that has been past a bound for too long."""
        facts = trained.facts
        if facts.signs.num_impossible:
            text = "step %d: %d sampled tokens are impossible under the policy that is trained"
            log.warning(text, trained.batch + 1, facts.signs.num_impossible)
        return self.bounds.past([*facts.steps, *facts.critic_steps], facts.signs)

    async def _publish(self, trained: TrainedBatch) -> None:
        """Counts the step, sends its weights on their way, and writes the records."""
        self.state.budget.count_trained()
        version = self.state.budget.trained
        sentence = self._past_bounds(trained)
        if sentence:
            with trained.timer.phase("train"), self.state.doing("going back to a checkpoint"):
                step = trained.batch
                sentence = await self.learner.run(lambda: self.go_back(step, sentence))
        with self.state.doing(f"the reference after step {version}"):
            await self.refresh(version)
        copying = f"the copy of version {version}"
        with trained.timer.phase("publish"), self.state.doing(copying):
            snapshot = await self.take(version)
        if self.placement.offload_train:  # it leaves when samplers wake, so it is saved before
            await self._record(trained, sentence)
            self.timer = PhaseTimer()
            await self._hand_on(snapshot, self.timer)
        else:
            await self._hand_on(snapshot, trained.timer)
            del snapshot  # a whole model
            await self._record(trained, sentence)
        self.state.changed.notify()

    async def _hand_on(self, snapshot: Snapshot, timer: PhaseTimer) -> None:
        version = snapshot.version
        with timer.phase("publish"):
            self.publish.submit(snapshot)
            if self.placement.takes_turns:
                budget = self.state.budget
                await self.state.changed.until(lambda: budget.published >= version)

    async def _record(self, trained: TrainedBatch, sentence: str) -> None:
        step = trained.batch + 1
        with self.state.doing(f"saving and recording step {step}"):
            await self.learner.run(lambda: self.after_step(trained))
        if sentence:
            raise RunError(f"step {step}: {sentence}")
