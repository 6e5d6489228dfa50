"""The lock that keeps a checkpoint while it is read; the fence against earlier generations."""

from __future__ import annotations

import fcntl
from contextlib import AbstractContextManager
from pathlib import Path

from pentad.core import lock
from pentad.core.errors import RunError
from pentad.core.files import REAL_DISK, Disk, write_atomic


def holding(commit: Path) -> AbstractContextManager[None]:
    """Keeps a checkpoint while it is read, by its COMMIT file; all readers share it."""
    return lock.holding(commit, fcntl.LOCK_SH)


FENCE = ".generation"
"""In the folder of a trial: a number that each life of the learners raises before it restores.
Every save and commit carries the number of its own, and looks again before it counts."""
FIRST = 1
"""Number of the first life, which finds no folder and writes no file before its first save."""


def read_fence(root: Path) -> int:
    """0 before the first."""
    try:
        text = (root / FENCE).read_text()
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
    """Whether a later generation has begun: what lies in the folders is no longer this one's."""
    return generation is not None and read_fence(root) > generation


def refuse_late(root: Path, generation: int | None) -> None:
    """RunError for a writer of an earlier generation; None: one that has no number."""
    if is_late(root, generation):
        raise RunError(
            f"{root}: written by generation {generation} of the learners, and "
            f"{read_fence(root)} has started: it is ignored"
        )
