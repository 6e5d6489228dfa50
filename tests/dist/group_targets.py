"""What the ranks of the tests of groups run."""

import logging
import os
import signal
import time

from pentad.core.errors import RunError, UserError
from pentad.core.group_values import gather_values
from pentad.runtime.rank import pulse

log = logging.getLogger("pentad.test")


class Noting:
    """Notes the calls that were made of it, or does what a test asks."""

    mild = frozenset({"refuse"})

    def __init__(self, given, rank, device):
        self.rank = rank
        self.device = device
        self.seen = []
        if given.get("bad_rank") == rank.rank:
            raise UserError("a = 1: is bad.")

    def note(self, **values):
        self.seen.append(values)
        log.info("noted by %d", self.rank.rank)
        return [self.rank.rank, len(self.seen)]

    def everyone(self):
        return gather_values(self.seen)

    def refuse(self):
        raise RunError(f"refused by rank {self.rank.rank}")

    def harm(self, rank, how):
        self.rank.report(3)
        if self.rank.rank == rank and how == "raise":
            raise KeyError("x")
        if self.rank.rank == rank and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        gather_values(None)  # the others wait for it

    def step(self):
        self.rank.report(3)

    def nap(self, seconds):
        time.sleep(seconds)

    def write(self, seconds):
        """As a background process of this rank that writes."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pulse()
            time.sleep(0.05)

    def close(self, *, is_failed):
        pass
