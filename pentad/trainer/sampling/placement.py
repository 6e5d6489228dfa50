"""Placement of the roles on devices. A mode selects one; the scheduler only reads its properties.

| mode     | trainer | rollout | scorers        | staleness | publish    |
|----------|---------|---------|----------------|-----------|------------|
| colocate | D       | D       | in the trainer | 0         | in place   |
| hybrid   | D1      | D2      | in the trainer | K         | overlapped |
| async    | D1      | D2      | own devices    | K         | overlapped |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from pentad.core.errors import InfraFailure, RunError
from pentad.core.roles import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which devices trainer and rollout use, and whether they share them."""

    is_shared: bool
    """Whether both roles use one device in turns; otherwise each has exclusive devices."""
    max_staleness: int
    snapshots_on_host: bool = False
    """Whether published weights are in host memory (`Config.snapshot_on_host`)."""
    offload_rollout: bool = False
    """Whether samplers sleep while the trainer has the shared devices."""
    offload_train: bool = False
    """Whether the trainer's state is in host memory while the samplers have the devices."""

    @property
    def is_on_policy(self) -> bool:
        """Whether all trained samples come from the current weights; such runs are repeatable."""
        return self.max_staleness == 0

    @property
    def takes_turns(self) -> bool:
        """Whether trainer and rollout alternate on the same devices, each waiting for the other."""
        return self.is_shared and self.is_on_policy

    @property
    def copies_snapshots(self) -> bool:
        """Whether snapshots are copies, because the learner trains, or leaves the device, while
        they are transferred."""
        return not self.takes_turns or self.offload_train


@dataclass(eq=False)
class DeviceTurns:
    """Runs the roles on shared devices one at a time; the others are asleep before one wakes up."""

    placement: Placement
    samplers: Sequence[Sampler]
    offload: Callable[[], Awaitable[None]] | None = None
    """Moves the trainer's state to host memory; its next use moves it back."""
    holder: str = "rollout"
    """The role that used the devices last."""
    memory_used: Callable[[], int | None] = lambda: None
    """Returns the bytes in use on the devices."""
    turns_gb: dict[str, float] = field(default_factory=dict)
    """Memory in use at the last switches, in GB."""

    @property
    def alternates(self) -> bool:
        return self.placement.takes_turns and self.placement.offload_rollout

    def _note_memory(self, when: str) -> None:
        used = self.memory_used()
        if used is not None:
            self.turns_gb[when] = round(used / 1e9, 3)

    async def enter(self, role: str) -> None:
        """Gives the shared devices to `role`: "rollout" or "actor"."""
        if not self.alternates or self.holder == role:
            return
        if role == "rollout":
            if self.offload is not None and self.placement.offload_train:
                await self.offload()
            self._note_memory("before_wake")
            for sampler in self.samplers:
                await _required(sampler.wake())
            self._note_memory("awake")
            self.holder = role
            return
        self.holder = role  # set first: a cancelled switch leaves some roles asleep
        self._note_memory("before_sleep")
        for sampler in self.samplers:
            await _required(sampler.sleep())
        self._note_memory("asleep")


async def _required(turn: Awaitable[None]) -> None:
    """Raises an error for a sampler that cannot free the memory that the other role needs."""
    try:
        await turn
    except InfraFailure as failure:
        raise RunError(str(failure)) from failure
