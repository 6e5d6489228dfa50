"""Locks that keep a local checkpoint from being removed while it is read, by whatever process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def holding(commit: Path) -> Iterator[None]:
    """Shared by all readers, on the COMMIT file; it ends with the process at the latest."""
    fd = os.open(commit, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def is_held(commit: Path) -> bool:
    """Whether somebody reads it now. On a file system without locks nobody is seen."""
    fd = os.open(commit, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
