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
"""File in a trial's folder with a number that each generation of learners increments before it
restores. Every save and commit has the number of its generation, and is rejected if the file has a
higher one."""
MAX_BYTES = 100
FIRST = 1
"""Number of the first generation, which has no folder yet and writes no file before its first
save."""


def read_fence(root: Path) -> int:
    """Reads the current generation; 0 if there is no file."""
    try:
        with open_file(root / FENCE) as file:
            text = file.read(MAX_BYTES)
    except FileNotFoundError:
        return 0
    return int(text) if text.strip().isdigit() else 0


def raise_fence(root: Path, disk: Disk = REAL_DISK) -> int:
    """Increments the generation and returns it. Later commits of earlier generations are rejected,
    except in the moment between their last check and the marker, which cannot be atomic."""
    if not root.exists():
        return FIRST
    generation = max(read_fence(root), FIRST) + 1
    write_atomic(root / FENCE, str(generation).encode(), disk)
    return generation


def is_late(root: Path, generation: int | None) -> bool:
    """Whether a later generation has begun, which then owns the folders."""
    return generation is not None and read_fence(root) > generation


def refuse_late(root: Path, generation: int | None) -> None:
    """Raises RunError for a writer of an earlier generation; None is not checked."""
    if is_late(root, generation):
        raise RunError(
            f"{root}: written by generation {generation} of the learners, and "
            f"{read_fence(root)} has started: it is ignored"
        )
