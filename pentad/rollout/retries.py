"""Retries of a group: which part of it is repeated after a failure, and how often.

An episode that raised is run again alone, with the same seed, because an answer that causes a
failure must not drop its group. If a replica failed, the group is sampled on another one with the
same seeds: other seeds would select answers by the health of machines. If its data failed, it is
sampled with new seeds. Rewards are repeated by their function, which needs no new samples.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field

from pentad.core.errors import DataFailure, InfraFailure
from pentad.core.types import Prompt

log = logging.getLogger(__name__)


class ReplicaFailed(InfraFailure):
    """A replica failed to sample a group; another one may sample it."""


@dataclass(slots=True, eq=False)
class GroupRetries:
    """Counts the failures of one group."""

    max_retries: int = 0
    """New seeds after failures of its data (`rollout.max_retries`)."""
    max_replicas: int = 0
    """Retries after failures of replicas, for each set of seeds."""
    num_reseeded: int = 0
    causes: list[str] = field(default_factory=list)
    """Failures of replicas with the present seeds."""
    repeated: set[Hashable] = field(default_factory=set)
    """Episodes that were run again."""

    def key(self, attempt: int) -> int | str:
        """Returns the part of the seeds that identifies the attempt."""
        return f"{attempt}.{self.num_reseeded}" if self.num_reseeded else attempt

    def after(self, failure: DataFailure | ReplicaFailed, prompt: Prompt) -> None:
        """Counts a failure of the group; raises if the group is not sampled again."""
        if isinstance(failure, ReplicaFailed):
            self.causes.append(str(failure))
            log.warning("prompt %d failed on %s", prompt.gid, failure)
            if len(self.causes) > self.max_replicas:
                causes = "; ".join(self.causes)
                text = f"prompt {prompt.gid} failed {len(self.causes)} times ({causes})"
                raise InfraFailure(text) from failure
            return
        if failure.is_final or self.num_reseeded == self.max_retries:
            raise failure
        self.num_reseeded += 1
        self.causes.clear()
        log.warning("prompt %d is sampled again: %s", prompt.gid, failure)

    def repeats(self, episode: Hashable) -> bool:
        """Counts a failure of an episode; returns whether to run it again, which is done once."""
        is_first = episode not in self.repeated
        self.repeated.add(episode)
        return is_first
