"""Where the roles live. A mode is nothing but one of these; the scheduler asks only questions.

| mode     | trainer | rollout | scorers        | staleness | publish    |
|----------|---------|---------|----------------|-----------|------------|
| colocate | D       | D       | in the trainer | 0         | in place   |
| hybrid   | D1      | D2      | in the trainer | K         | overlapped |
| async    | D1      | D2      | own devices    | K         | overlapped |
"""

from __future__ import annotations

from dataclasses import dataclass

from pentad.core.roles import Sampler


@dataclass(frozen=True, slots=True)
class Placement:
    """Device sets by role, in one process: names such as "cpu" or "cuda:0"."""

    devices: dict[str, str]
    max_staleness: int
    offload_rollout: bool = False
    """Put the samplers to sleep while the trainer has the shared devices."""
    scorers_own_devices: bool = False

    def shared(self, one: str, other: str) -> bool:
        return self.devices[one] == self.devices[other]

    @property
    def is_on_policy(self) -> bool:
        """Everything trained was sampled by the weights it trains; such runs are repeatable."""
        return self.max_staleness == 0

    @property
    def takes_turns(self) -> bool:
        """Trainer and rollout alternate on the same devices, so one waits for the other."""
        return self.shared("actor", "rollout") and self.is_on_policy

    @property
    def copies_snapshots(self) -> bool:
        """The learner moves on while its weights travel."""
        return not self.takes_turns


def place(
    mode: str, *, train_device: str, rollout_device: str, max_staleness: int, offload_rollout: bool
) -> Placement:
    """The preset behind a mode's name.

    In one process on one device the roles of hybrid and async are threads: they own their time
    rather than a device of their own, which is what the suffix says.
    """
    devices = {"actor": train_device, "rollout": rollout_device, "scorer": train_device}
    if mode == "colocate":
        devices["rollout"] = train_device
    elif train_device == rollout_device:
        devices["rollout"] = f"{rollout_device}/rollout-thread"
    if mode == "async":
        devices["scorer"] = f"{train_device}/scorer"
    return Placement(
        devices,
        max_staleness,
        offload_rollout=offload_rollout,
        scorers_own_devices=mode == "async",
    )


class Turnstile:
    """Roles that share devices pass one at a time; all sleep before any wakes."""

    def __init__(self, placement: Placement, samplers: list[Sampler]) -> None:
        self.samplers = samplers
        self.alternates = placement.takes_turns and placement.offload_rollout
        self.holder = "rollout"

    async def enter(self, role: str) -> None:
        """Gives the shared devices to `role`: "rollout" or "actor"."""
        if not self.alternates or self.holder == role:
            return
        for sampler in self.samplers:
            await (sampler.wake() if role == "rollout" else sampler.sleep())
        self.holder = role
