"""The scheduler: its pumps and a watchdog on one event loop, and how a run ends.

    prompts --(admit: budget)--> rollout pump --(commit)--> ledger + store
    [ledger + store --(columns)--> score pump --(score)--> ledger + store]   with scorers apart
    ledger + store --(lease)--> train pump --(snapshot)--> publish pump --(install)--> samplers
    publish pump --(published)--> budget, which opens the next batch

| pump    | waits for                  | is unblocked by            |
|---------|----------------------------|----------------------------|
| rollout | a free slot the budget allows | publish, a dropped group |
| score   | sampled groups                | a committed group        |
| train   | the next groups of its batch  | a committed or scored group |
| publish | a snapshot                    | a finished step          |
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from pentad.core.errors import RunError, UserError, first_cause
from pentad.trainer.state import RunState
from pentad.trainer.stopping import stop_on_signals
from pentad.trainer.watchdog import Watchdog


class Pump(Protocol):
    async def run(self) -> None:
        """Until the run is over."""
        ...


class NoPump:
    """In the place of one that a run does not need."""

    async def run(self) -> None:
        return


class Scheduler:
    def __init__(
        self,
        state: RunState,
        rollout: Pump,
        train: Pump,
        publish: Pump,
        watchdog: Watchdog,
        score: Pump | None = None,
    ) -> None:
        self.state = state
        self.rollout = rollout
        self.train = train
        self.publish = publish
        self.watchdog = watchdog
        self.score = score

    async def run(self) -> None:
        """Until all batches are trained and published, or a signal asked to stop. Raises the first
        failure, unwrapped."""
        try:
            with stop_on_signals(self.state.request_stop):
                async with asyncio.TaskGroup() as tasks:
                    watching = tasks.create_task(self.watchdog.run(), name="watchdog")
                    pumps = [
                        tasks.create_task(self.publish.run(), name="publish pump"),
                        tasks.create_task(self.rollout.run(), name="rollout pump"),
                        tasks.create_task(self.train.run(), name="train pump"),
                    ]
                    if self.score is not None:
                        pumps.append(tasks.create_task(self.score.run(), name="score pump"))
                    await asyncio.gather(*pumps)
                    watching.cancel()
        except BaseExceptionGroup as failures:
            cause = first_cause(failures)
            if isinstance(cause, UserError):  # bad input, but too late for "nothing was started"
                cause = RunError(str(cause))
            raise cause from failures
