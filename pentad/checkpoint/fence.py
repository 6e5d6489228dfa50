"""The lock on a checkpoint that is being read, and the fence against writers of earlier
generations."""

from __future__ import annotations

import fcntl
from contextlib import AbstractContextManager
from pathlib import Path

from pentad.core import lock
from pentad.core.errors import RunError
from pentad.core.files import REAL_DISK, Disk, write_atomic
from pentad.core.folders import open_file


def holding(commit: Path) -> AbstractContextManager[None]:
    """Locks a checkpoint while it is read, by its COMMIT file; readers share the lock."""
    return lock.holding(commit, fcntl.LOCK_SH)


FENCE = ".generation"
"""Name of a file in the folder of a trial: a number that each generation of the learners increases
before it restores. Every save and commit carries the number of its generation, and compares it
before it counts."""
MAX_BYTES = 100
FIRST = 1
"""Number of the first generation, which finds no folder and writes no file before its first
save."""


def read_fence(root: Path) -> int:
    """The number; 0 before the first generation."""
    try:
        with open_file(root / FENCE) as file:
            text = file.read(MAX_BYTES)
    except FileNotFoundError:
        return 0
    return int(text) if text.strip().isdigit() else 0


def raise_fence(root: Path, disk: Disk = REAL_DISK) -> int:
    """The next generation. What those before it have not committed yet is refused, up to the moment
    between their last look and the marker, which no file system makes one."""
    if not root.exists():
        return FIRST
    generation = max(read_fence(root), FIRST) + 1
    write_atomic(root / FENCE, str(generation).encode(), disk)
    return generation


def is_late(root: Path, generation: int | None) -> bool:
    """Whether a later generation has begun, to which the folders belong then."""
    return generation is not None and read_fence(root) > generation


def refuse_late(root: Path, generation: int | None) -> None:
    """Raises RunError for a writer of an earlier generation; None is not checked."""
    if is_late(root, generation):
        raise RunError(
            f"{root}: written by generation {generation} of the learners, and "
            f"{read_fence(root)} has started: it is ignored"
        )
