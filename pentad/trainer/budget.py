"""How far sampling may lead the weights: staleness as arithmetic on two counters.

Batch b is trained as the step that makes version b into version b + 1. It may be admitted once
b <= published + max_staleness. Tokens are drawn at a version not below `published` as it was at
admission, so trained version - token version <= max_staleness holds by construction; nothing is
discarded, and slow prompts are not starved.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Budget:
    groups_per_batch: int
    max_staleness: int
    num_batches: int
    """Batches of the whole run; none beyond the last is admitted."""
    trained: int = 0
    """Batches trained, hence the version the learner holds."""
    published: int = 0
    """Oldest version a serving sampler holds."""

    @property
    def capacity_groups(self) -> int:
        """Groups that may be alive at once; derived, since a smaller one could deadlock."""
        return self.groups_per_batch * (self.max_staleness + 1)

    @property
    def last_open_batch(self) -> int:
        """The newest batch whose groups may be admitted now."""
        return min(self.published + self.max_staleness, self.num_batches - 1)

    def may_admit(self, batch: int) -> bool:
        return batch <= self.last_open_batch

    def closed_gate(self, batch: int) -> str:
        """Why groups of `batch` are not admitted now; empty when they are."""
        if self.may_admit(batch):
            return ""
        if batch >= self.num_batches:
            return f"batch {batch} lies beyond the last of the run ({self.num_batches - 1})"
        return (
            f"staleness: batch {batch} waits for version {batch - self.max_staleness} to be "
            f"published (published {self.published}, max_staleness {self.max_staleness})"
        )

    def count_trained(self) -> None:
        self.trained += 1

    def count_published(self, version: int) -> None:
        assert version >= self.published, "versions only grow"
        self.published = version
