"""Temporary folders: removed by their owner, or at a later start if their owner was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWNER = "owner.lock"
"""Held by the owner; the lock goes with its process, however that ends."""
YOUNG_S = 10.0
"""A folder is made a moment before its lock is taken."""


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A folder of our own in the temporary folder; those that dead owners left are removed."""
    sweep(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def sweep(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            found = folder.lstat()
            is_young = time.time() - found.st_mtime < YOUNG_S
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or is_young:
                continue
            lock = os.open(folder / OWNER, os.O_RDWR)
        except OSError:  # removed just now, or none of ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:  # its owner lives
            continue
        finally:
            os.close(lock)
