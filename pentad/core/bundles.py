"""What a run asks of Ray: GPUs of one node that are given out together, and who uses which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One bundle of the run's placement group. Ray keeps it on one node."""

    cpus: float
    gpus: int
    members: Mapping[str, tuple[int, ...]]
    """Processes in it, with the GPUs of the bundle that each of them sees."""

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, "GPU": self.gpus} if self.gpus else {"CPU": self.cpus}

    def gpu_share(self, name: str) -> float:
        """What a process counts of the bundle's GPUs: an equal share of each that it sees."""
        users = [position for seen in self.members.values() for position in seen]
        own = self.members[name]
        if len(users) == len(set(users)):
            return len(own)
        # Ray counts shares of one GPU, and whole GPUs beyond that.
        return min(1.0 / users.count(position) for position in own) if own else 0.0
