"""Ranks that do wrong on purpose: the first case kills a rank, the others drop a sum over ranks."""

import os

from pentad.core.errors import RunError
from pentad.engine import held
from pentad_tools.parallel.parallel_ranks import LayoutService


class Sabotaged(LayoutService):
    def measure(self, number, **case):
        if number == 0 and self.rank.rank == 1:
            os._exit(9)
        assert "sum_copies" in vars(held), "there is nothing left to sabotage"
        held.sum_copies = lambda *_: None
        return super().measure(number, **case)


class FailingLate(LayoutService):
    def close(self, *, is_failed):
        raise RunError("no way out")
