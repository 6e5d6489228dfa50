"""Files in folders that all users write to (/dev/shm, /tmp): only those of our own are opened."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OTHERS_WRITE = 0o022


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a plain file of this user, in a folder that no other user can change.

    Anything else is an OSError: another user's file or folder, a link, and what opening would wait
    for, such as a FIFO.
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
        raise PermissionError(errno.EPERM, "it is no plain file of this user", str(path))
    return file
