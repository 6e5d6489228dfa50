"""One rank of a group of processes: who it is, and how it says how far it has come."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pentad.core.errors import Problem, UserError

ENTRY = struct.Struct("=qdd")
"""Of one rank on the board: its step and when it said so; when the process was last seen to run."""
STEP, BEAT = (struct.Struct(form) for form in ("=qd", "=d"))
NO_STEP = -1
BEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class RankEntry:
    step: int | None
    """None before the first."""
    step_at: float
    beat_at: float


class Board:
    """What each rank last reported, in a file that ranks and their watcher share.

    A rank writes its own entry only; times are those of the machine's monotonic clock.
    """

    def __init__(self, path: Path, world: int) -> None:
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), world * ENTRY.size)

    @classmethod
    def make(cls, path: Path, world: int) -> Board:
        now = time.monotonic()
        path.write_bytes(ENTRY.pack(NO_STEP, now, now) * world)
        return cls(path, world)

    def write_step(self, rank: int, step: int) -> None:
        STEP.pack_into(self.memory, rank * ENTRY.size, step, time.monotonic())

    def write_beat(self, rank: int) -> None:
        offset = rank * ENTRY.size + STEP.size
        BEAT.pack_into(self.memory, offset, time.monotonic())

    def read(self, rank: int) -> RankEntry:
        step, at, beat = ENTRY.unpack_from(self.memory, rank * ENTRY.size)
        return RankEntry(None if step == NO_STEP else step, at, beat)


@dataclass(slots=True)
class Rank:
    """What a function that runs on every rank is told about where it runs."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Among the ranks of this machine: which of its devices is this rank's."""
    step: int | None = None
    board: Board | None = None
    num_calls: int = 0
    moved_at: float | None = None
    """When the call under way began or last moved; None when none is."""

    def start_beating(self) -> None:
        """Shows from now on that this process runs, whatever its other threads wait for."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def _beat(self) -> None:
        assert self.board is not None, "the launcher gives it"
        while True:
            self.board.write_beat(self.rank)
            time.sleep(BEAT_S)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Within, a call is made that all ranks make: the watcher compares where they stand."""
        self.num_calls += 1
        pulse.rank = self
        self.moved()
        try:
            yield
        finally:
            pulse.rank = self.moved_at = None

    def moved(self) -> None:
        self.moved_at = time.monotonic()

    def beat(self) -> dict[str, float]:
        """Where it stands: -1 before the first step, and for no call under way."""
        at = self.moved_at
        still_s = -1.0 if at is None else time.monotonic() - at
        step = NO_STEP if self.step is None else self.step
        return {"step": step, "call": self.num_calls, "still_s": still_s}

    def report(self, step: int) -> None:
        """Says that work on `step` begins; a group that reports nothing for long is ended."""
        self.step = step
        if self.board is not None:
            self.board.write_step(self.rank, step)

    def __str__(self) -> str:
        return name_rank(self.rank, self.world, self.step)


class Pulse:
    """Called where long work passes a mark (a microbatch, a tensor): it goes on."""

    def __init__(self) -> None:
        self.count = 0
        self.rank: Rank | None = None
        """Whose call is under way."""

    def __call__(self) -> None:
        self.count += 1
        if self.rank is not None:
            self.rank.moved()


pulse = Pulse()
"""Of this process."""


def name_rank(rank: int, world: int, step: int | None) -> str:
    """Example: rank 3 of 8, step 12."""
    when = "before its first step" if step is None else f"step {step}"
    return f"rank {rank} of {world}, {when}"


def is_one_machine(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all ranks are on this machine, as far as torchrun, or who else started them, says."""
    world = environment.get("WORLD_SIZE", "1")
    return environment.get("LOCAL_WORLD_SIZE", world) == world


def rank_from_environment(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """The rank that torchrun, or whoever else set RANK and WORLD_SIZE, made of this process."""
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
