"""Ray bundles of a run: GPUs of a node that are allocated together, and the processes on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One bundle of the run's placement group. Ray keeps it on one node."""

    cpus: float
    gpus: int
    members: Mapping[str, tuple[int, ...]]
    """Process name -> GPUs of the bundle that are visible to it."""

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, "GPU": self.gpus} if self.gpus else {"CPU": self.cpus}

    def gpu_share(self, name: str) -> float:
        """The GPU amount that a process requests from Ray: an equal share of each visible GPU."""
        users = [position for seen in self.members.values() for position in seen]
        own = self.members[name]
        if len(users) == len(set(users)):
            return len(own)
        # Ray accepts a fraction of one GPU, or a whole number.
        return min(1.0 / users.count(position) for position in own) if own else 0.0
