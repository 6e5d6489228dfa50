"""Ray bundles of a run: GPUs of one node that are allocated together, and the processes that use
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One bundle of the run's placement group. Ray keeps it on one node."""

    cpus: float
    gpus: int
    members: Mapping[str, tuple[int, ...]]
    """Its processes, with the GPUs of the bundle visible to each."""

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, "GPU": self.gpus} if self.gpus else {"CPU": self.cpus}

    def gpu_share(self, name: str) -> float:
        """The share of the bundle's GPUs that a process requests: an equal share of each visible
        one."""
        users = [position for seen in self.members.values() for position in seen]
        own = self.members[name]
        if len(users) == len(set(users)):
            return len(own)
        # Ray counts shares of one GPU, and whole GPUs beyond that.
        return min(1.0 / users.count(position) for position in own) if own else 0.0
