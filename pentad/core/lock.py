"""Locks a folder, so that only one program on any machine writes to it.

The lock of the operating system ends with its holder. For file systems that do not share locks
between machines, the lock file names the holder, which touches it every BEAT_S; if it is unchanged
for SILENCE_S, a holder on another machine counts as dead.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pentad.core.errors import Problem, UserError

log = logging.getLogger(__name__)

NAME = "run.lock"
BEAT_S = 5.0
SILENCE_S = 20.0
HOLDER = re.compile(r"process (\d+) on (\S+) since ")


@contextmanager
def holding(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Locks a file or folder until the context or the process ends (`is_held` is true until then).
    Has no effect on a file system without locks."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock of a path, shared or exclusive."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)
    return False


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process; an invalid number
        return True
    return True


class FolderLock:
    """A lock held until it is closed or the process ends."""

    def __init__(self, folder: Path, where: str, name: str = NAME) -> None:
        """Creates and locks the folder. UserError if another program has the lock; OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / name
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip()
            if not self._is_free(holder):
                remedy = "wait for it, or choose another trial_name"
                rule = f"another program runs in it ({holder or 'unknown'})"
                raise UserError(Problem(where, rule, remedy))
            since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            text = f"process {os.getpid()} on {os.uname().nodename} since {since}\n"
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode(), 0)
        except BaseException:
            os.close(self._fd)
            raise
        self._closing = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="folder-lock", daemon=True)
        self._beating.start()

    def is_there(self) -> bool:
        """Whether the lock file in the folder is still the one that is held."""
        own = os.fstat(self._fd)
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._beating.join()
            os.ftruncate(self._fd, 0)
            os.close(self._fd)

    def _is_free(self, holder: str) -> bool:
        known = HOLDER.match(holder)
        is_here = known is not None and known[2] == os.uname().nodename
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if is_here and known is not None:  # a file system without locks
                return not is_alive(int(known[1]))
        return known is None or is_here or not self._is_touched(holder)

    def _is_touched(self, holder: str) -> bool:
        """Waits for a touch of the file; returns whether the holder on another machine is alive."""
        text = "%s names %s: it counts as dead if it does not touch the file for %g s"
        log.info(text, self.path, holder, SILENCE_S)
        before, end = self._touched_at(), time.monotonic() + SILENCE_S
        while time.monotonic() < end:
            time.sleep(BEAT_S / 5)
            if self._touched_at() != before:
                return True
        return False

    def _touched_at(self) -> int:
        with self.path.open("rb") as file:  # open makes network file systems refresh
            return os.fstat(file.fileno()).st_mtime_ns

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            try:
                os.utime(self._fd)
            except OSError as error:  # a full or lost disk is reported by the next write
                log.debug("%s: %s", self.path, error)
