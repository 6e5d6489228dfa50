"""One rank of a group of processes: who it is, and how it says how far it has come."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pentad.core.errors import Problem, UserError

ENTRY = struct.Struct("=qd")
"""Of one rank on the board: its step, and when it said so."""
NO_STEP = -1


class Board:
    """What each rank last reported, in a file that ranks and their watcher share.

    A rank writes its own entry only; times are those of the machine's monotonic clock.
    """

    def __init__(self, path: Path, world: int) -> None:
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), world * ENTRY.size)

    @classmethod
    def make(cls, path: Path, world: int) -> Board:
        path.write_bytes(ENTRY.pack(NO_STEP, time.monotonic()) * world)
        return cls(path, world)

    def write(self, rank: int, step: int) -> None:
        ENTRY.pack_into(self.memory, rank * ENTRY.size, step, time.monotonic())

    def read(self, rank: int) -> tuple[int | None, float]:
        """(step, None before the first; when it was reported)."""
        step, at = ENTRY.unpack_from(self.memory, rank * ENTRY.size)
        return (None if step == NO_STEP else step), at


@dataclass(slots=True)
class Rank:
    """What a function that runs on every rank is told about where it runs."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """Among the ranks of this machine: which of its devices is this rank's."""
    step: int | None = None
    board: Board | None = None

    def report(self, step: int) -> None:
        """Says that work on `step` begins; a group that reports nothing for long is ended."""
        self.step = step
        if self.board is not None:
            self.board.write(self.rank, step)

    def __str__(self) -> str:
        return name_rank(self.rank, self.world, self.step)


def name_rank(rank: int, world: int, step: int | None) -> str:
    """Example: rank 3 of 8, step 12."""
    when = "before its first step" if step is None else f"step {step}"
    return f"rank {rank} of {world}, {when}"


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
