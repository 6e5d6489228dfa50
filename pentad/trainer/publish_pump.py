"""The publish pump: brings the newest weights to the samplers, then evaluates them if due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pentad.core.errors import InfraFailure, RunError
from pentad.sync.publisher import Publisher, Snapshot
from pentad.trainer.evaluator import Evaluator
from pentad.trainer.placement import Placement, Turnstile
from pentad.trainer.probing import Prober
from pentad.trainer.state import RunState

CAUSE_S, LOOK_S = 5.0, 0.1
"""How long after a failed publish the loss of the learner may take to be known."""


class PublishPump:
    """Latest wins: a snapshot not yet on its way is replaced by a newer one.

    An evaluation is pinned to one version because no publish starts while it runs. On-policy,
    admission waits for it too, so that nothing else is decoded beside it.
    """

    def __init__(
        self,
        state: RunState,
        publisher: Publisher,
        evaluator: Evaluator | None,
        placement: Placement,
        turnstile: Turnstile,
        prober: Prober | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`check` raises what ended the learner, where that is other processes."""
        self.state = state
        self.publisher = publisher
        self.evaluator = evaluator
        self.admit_after_eval = placement.is_on_policy
        self.turnstile = turnstile
        self.prober = prober
        self.check = check
        self.is_probing = False
        """Samplers are to be compared with the version on its way, or just are."""
        self.pending: Snapshot | None = None
        self.is_closed = False

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

    async def wait_published(self, version: int) -> None:
        await self.state.changed.until(lambda: self.state.budget.published >= version)

    async def _publish(self, snapshot: Snapshot) -> None:
        await self.turnstile.enter("rollout")
        with self.state.doing(f"publishing version {snapshot.version}"):
            try:
                await self.publisher.publish(snapshot)
            except (RunError, InfraFailure):
                await self._look_at_learner()
                raise
        if not self.admit_after_eval:
            self._count(snapshot.version)
        if self.prober is not None and self.is_probing:
            await self.prober.probe(snapshot.version)
            self.is_probing = False
            self.state.changed.notify()
        if self.evaluator is not None and self.evaluator.is_due(snapshot.version):
            with self.state.doing(f"evaluation of version {snapshot.version}"):
                await self.evaluator.evaluate(snapshot.version)
        if self.admit_after_eval:
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
