"""A rank of a group of processes: its identity and its progress reports."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pentad.core import faults
from pentad.core.errors import Problem, UserError
from pentad.runtime.awake import awake_s

NO_STEP = -1


@dataclass(slots=True)
class Rank:
    """The identity of a rank, for functions that run on every rank."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Index among the ranks of this machine, also of its device."""
    step: int | None = None
    num_calls: int = 0
    moved_at: float | None = None
    """Time at which the call in progress began or last made progress; None without a call."""

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Marks a call on all ranks while active, so the monitor can compare their progress."""
        self.num_calls += 1
        pulse.rank = self
        faults.where.rank = self.rank
        self.moved()
        try:
            yield
        finally:
            pulse.rank = self.moved_at = None

    def moved(self) -> None:
        self.moved_at = awake_s()

    def beat(self) -> dict[str, float]:
        """Returns step (-1 before the first), call, seconds without progress (-1: no call), and
        signs of progress so far, also of work outside calls such as a write."""
        at = self.moved_at
        still_s = -1.0 if at is None else awake_s() - at
        step = NO_STEP if self.step is None else self.step
        return {"step": step, "call": self.num_calls, "still_s": still_s, "pulses": pulse.count}

    def report(self, step: int) -> None:
        """Reports that work on `step` begins; without reports a group is ended after a time
        limit."""
        self.step = step
        faults.where.rank, faults.where.step = self.rank, step


class Pulse:
    """Counts signs of progress of long work; called after each microbatch or tensor."""

    def __init__(self) -> None:
        self.count = 0
        self.rank: Rank | None = None
        """The rank of the call in progress."""

    def __call__(self) -> None:
        self.count += 1
        if self.rank is not None:
            self.rank.moved()


pulse = Pulse()
"""The counter of this process."""


def name_rank(rank: int, world: int, step: int | None) -> str:
    """Example: rank 3 of 8, step 12."""
    when = "before its first step" if step is None else f"step {step}"
    return f"rank {rank} of {world}, {when}"


def is_one_machine() -> bool:
    """Returns whether all ranks are on this machine, from the variables of the launcher."""
    world = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world) == world


def rank_from_environment(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """Returns the rank of this process, if torchrun or another launcher set RANK and WORLD_SIZE."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = []
    for key in keys:
        text = environment.get(key, environment["RANK"])
        if not text.isdigit():
            rule, remedy = "must be a number", "start with torchrun, or unset it"
            raise UserError(Problem(f"{key} = {text}", rule, remedy))
        values.append(int(text))
    rank, world, local_rank = values
    if rank >= world:
        remedy = "start with torchrun, or unset both"
        raise UserError(Problem(f"RANK = {rank}", f"must be below WORLD_SIZE = {world}", remedy))
    return Rank(rank, world, local_rank)
