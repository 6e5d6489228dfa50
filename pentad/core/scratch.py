"""Temporary folders: removed by their owner, or at a later start if their owner was killed.

They are in folders that all users can write (/dev/shm, /tmp): only own files are opened.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER = "owner.lock"
"""Name of the lock file, locked by the owner; the lock ends with its process."""
OF_EARLIER_VERSIONS = "owner"
"""Name of the lock file in stores of earlier versions."""
YOUNG_S = 10.0
"""Age below which an unlocked folder may still be in creation and is not removed."""
CLEANING_S = 60.0
OTHERS_WRITE = 0o022
SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> Path:
    """The folder for files in memory, or the one for temporary files if there is none."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Creates a temporary folder in `parent` (None: the system's) and removes those of dead
    owners."""
    sweep(prefix, parent)
    made = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    lock = os.open(made / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = made.rename(made.with_name(made.name[1:]))
    try:
        yield folder
    finally:
        (folder / OWNER).unlink(missing_ok=True)
        os.close(lock)
        remove(folder)


def sweep(prefix: str, parent: Path | None = None) -> None:
    place = parent or Path(tempfile.gettempdir())
    for folder in (*place.glob(f"{prefix}*"), *place.glob(f".{prefix}*")):
        try:
            is_unnamed = folder.name.startswith(".")
            if is_unnamed and time.time() - folder.lstat().st_mtime < YOUNG_S:
                continue
            lock = _open_lock(folder)
        except OSError:  # already removed, or not ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)
        except BlockingIOError:  # its owner is alive
            continue
        finally:
            os.close(lock)


def _open_lock(folder: Path) -> int:
    try:
        return open_own(folder / OWNER, os.O_RDWR)
    except FileNotFoundError:
        return open_own(folder / OF_EARLIER_VERSIONS, os.O_RDWR)


def remove(folder: Path | str, timeout_s: float = CLEANING_S) -> None:
    """Removes a folder of any depth and permissions, within the time limit."""
    with suppress(OSError):  # not empty
        Path(folder).rmdir()
        return
    with suppress(subprocess.TimeoutExpired):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            quiet = subprocess.DEVNULL
            subprocess.run([*command, "--", folder], stderr=quiet, timeout=timeout_s, check=False)


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a plain file of this user, in a folder that only this user can change.

    OSError for anything else: another user's file or folder, a link, or a FIFO, which would block.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & OTHERS_WRITE:
            raise PermissionError(errno.EPERM, "others can change it", str(path.parent))
        file = os.open(path.name, flags | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    found = os.fstat(file)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise PermissionError(errno.EPERM, "it is not a plain file of this user", str(path))
    return file
