"""The train pump: leases a batch's groups, updates the learner, hands on its weights."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.roles import Learner
from pentad.core.types import Group
from pentad.data.ledger import PromptFunnel
from pentad.rl.bounds import Bounds, compare, num_impossible
from pentad.sync.publisher import take_snapshot
from pentad.telemetry.timing import PhaseTimer
from pentad.trainer.placement import Placement, Turnstile
from pentad.trainer.publish_pump import PublishPump
from pentad.trainer.state import DataProgress, RunState
from pentad.trainer.update import BatchResult, BatchUpdate

log = logging.getLogger(__name__)

T = TypeVar("T")


class LearnerThread:
    """The one thread on which learners are called, so that their program order is one order.

    A daemon: a call that never returns must not keep the program from ending.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self.since: float | None = None
        """When the call under way began."""
        self.is_given_up = False
        """Set by who will not wait for the call under way."""
        self.thread = threading.Thread(target=self._work, name="learner", daemon=True)
        self.thread.start()

    async def run(self, function: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self.calls.put((function, future))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            function, future = call
            if not future.set_running_or_notify_cancel():
                continue
            self.since = time.monotonic()
            try:
                future.set_result(function())
            except BaseException as error:  # it is the caller's
                future.set_exception(error)
            self.since = None

    def close(self, limit_s: float) -> None:
        """Waits for the call under way, as long as it has not taken `limit_s` in all."""
        self.calls.put(None)
        since = time.monotonic() if self.since is None else self.since
        while not self.is_given_up and self.thread.is_alive():
            if time.monotonic() > since + limit_s:
                self.is_given_up = True
            self.thread.join(0.05)


@dataclass(slots=True)
class TrainedBatch:
    """One finished step, for the records."""

    batch: int
    groups: list[Group]
    result: BatchResult
    funnel: PromptFunnel
    """As it was when the batch was done; the next one may be under way by now."""
    timer: PhaseTimer
    progress: DataProgress
    """Where the data stood when it was done: what belongs to the weights after it."""


def on_host(columns: Sequence[Tensor]) -> list[np.ndarray]:
    """fp32 columns of many rows, in one copy from the device."""
    if not columns:
        return []
    flat = torch.cat([column.detach() for column in columns]).float().cpu()
    return [part.numpy() for part in flat.split([len(column) for column in columns])]


def chunk_slots(size: int, num_chunks: int) -> list[range]:
    """The parts of a batch of `size` groups that are trained one after the other."""
    bounds = [chunk * size // num_chunks for chunk in range(num_chunks + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


class TrainPump:
    def __init__(
        self,
        state: RunState,
        learner: Learner,
        update: BatchUpdate,
        publish: PublishPump,
        placement: Placement,
        turnstile: Turnstile,
        thread: LearnerThread,
        *,
        num_chunks: int,
        ref_update_interval: int | None,
        bounds: Bounds,
        before_step: Callable[[int], None],
        on_trained: Callable[[TrainedBatch], None],
        after_step: Callable[[TrainedBatch], None],
    ) -> None:
        self.state = state
        self.learner = learner
        self.update = update
        self.publish = publish
        self.placement = placement
        self.turnstile = turnstile
        self.thread = thread
        self.num_chunks = num_chunks
        self.ref_update_interval = ref_update_interval
        self.bounds = bounds
        self.before_step = before_step
        """Called on the learner's thread with the batch that is about to be trained."""
        self.on_trained = on_trained
        """Called as soon as a batch is in the weights."""
        self.after_step = after_step
        """Called on the learner's thread with the weights of the step still in place."""

    async def run(self) -> None:
        while not self.state.is_over:
            trained = await self._step(self.state.budget.trained)
            if trained is not None:
                await self._publish(trained)
        self.publish.close()

    async def _step(self, batch: int) -> TrainedBatch | None:
        """Trains one batch; None when the run was stopped before the batch was whole."""
        timer = PhaseTimer()
        groups: list[Group] = []
        with self.state.doing(f"the start of step {batch + 1}"):
            await self.thread.run(lambda: self.before_step(batch))
            await self.thread.run(self.update.begin)
        async for chunk in self._chunks(batch, timer):
            groups += chunk
            last = len(groups) == self.state.budget.groups_per_batch
            await self.turnstile.enter("actor")
            with timer.phase("train"), self.state.doing(f"training of step {batch + 1}"):
                await self.thread.run(lambda c=chunk, end=last: self.update.add(c, last=end))  # type: ignore[misc]
        if len(groups) < self.state.budget.groups_per_batch:
            self.state.ledger.release([group.gid for group in groups])
            return None
        with timer.phase("publish"):
            # Until then the learner must hold the weights that samplers are compared with.
            what = "the samplers to be compared with the trainer"
            await self.state.wait_for("train", what, lambda: not self.publish.is_probing)
        with timer.phase("train"), self.state.doing(f"the update of step {batch + 1}"):
            result = await self.thread.run(self.update.finish)
        gids = [group.gid for group in groups]
        self.state.ledger.ack(gids)
        self.state.store.delete(gids)
        funnel, progress = self.state.ledger.funnel(), self.state.progress()
        trained = TrainedBatch(batch, groups, result, funnel, timer, progress)
        self.on_trained(trained)
        return trained

    async def _chunks(self, batch: int, timer: PhaseTimer) -> AsyncIterator[list[Group]]:
        """The batch's groups in slot order, as soon as each chunk of them is ready."""
        ledger, size = self.state.ledger, self.state.budget.groups_per_batch
        for chunk, slots in enumerate(chunk_slots(size, self.num_chunks)):
            # Sleeping samplers finish nothing, so the devices are taken only for a whole batch.
            awaited = range(size) if self.turnstile.alternates and chunk == 0 else slots
            with timer.phase("rollout"):
                await self.state.wait_for(
                    "train",
                    f"groups {awaited.start} to {awaited.stop - 1} of batch {batch}",
                    lambda slots=awaited: ledger.are_ready(batch, slots),  # type: ignore[misc]
                )
            if not ledger.are_ready(batch, awaited):
                return
            groups = self.state.store.get(ledger.lease(batch, slots))
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
        result, step = trained.result, trained.batch + 1
        samples = [sample for sample, _ in result.scored]
        compared = compare(samples, on_host([said for _, said in result.scored]), trained.batch)
        if impossible := num_impossible(compared):
            text = "step %d: %d sampled tokens are impossible under the policy that is trained"
            log.warning(text, step, impossible)
        return self.bounds.past([*result.steps, *result.critic_steps], compared)

    async def _publish(self, trained: TrainedBatch) -> None:
        """Counts the step, sends its weights on their way, and writes the records."""
        self.state.budget.count_trained()
        version = self.state.budget.trained
        if self.ref_update_interval and version % self.ref_update_interval == 0:
            await self.thread.run(lambda: self.learner.save_tag("ref"))
        with trained.timer.phase("publish"):
            copy, on_host = self.placement.copies_snapshots, self.placement.snapshots_on_host
            with self.state.doing(f"the copy of version {version}"):
                snapshot = await self.thread.run(
                    lambda: take_snapshot(
                        version, self.learner.iter_weights(), copy=copy, on_host=on_host
                    )
                )
            self.publish.submit(snapshot)
            if self.placement.takes_turns:
                await self.publish.wait_published(version)
        sentence = self._past_bounds(trained)
        with self.state.doing(f"saving and recording step {version}"):
            await self.thread.run(lambda: self.after_step(trained))
        if sentence:
            raise RunError(f"step {version}: {sentence}")
        self.state.changed.notify()
