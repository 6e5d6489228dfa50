"""The operations that change storage, one method each, so that tests can record or fail any one;
locks that keep a checkpoint while it is read, and the fence against an earlier generation.

Reading does not go through here. Data is durable after `fsync`, a name in a folder after
`fsync_dir` of that folder; nothing else is relied on, except that `rename` is atomic.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from pentad.core import lock
from pentad.core.errors import RunError, naming

FILE_MODE = 0o644


class Disk:
    """The real one. Paths are absolute; errors are the operating system's."""

    def make_dir(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> int:
        """A new file, open for writing; one that is there already is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def open_shared(self, path: Path) -> int:
        """A file that several ranks write into; the first that comes makes it."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """All of the data, however many calls it takes."""
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:], offset + done)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fsync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, path: Path, target: Path) -> None:
        path.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_dir(self, path: Path) -> None:
        path.rmdir()


REAL_DISK = Disk()


def make_folders(disk: Disk, folder: Path) -> None:
    """The folder with those above it; names of new ones are durable when this returns."""
    if folder.is_dir():
        return
    make_folders(disk, folder.parent)
    try:
        disk.make_dir(folder)
    except FileExistsError:  # another rank was quicker
        if not folder.is_dir():
            raise
    disk.fsync_dir(folder.parent)


def write_aside(disk: Disk, path: Path, data: bytes) -> None:
    """A small file, durable, whole or not at all, in the place of one that may be there."""
    aside = path.with_name(f".{path.name}.aside-{os.getpid()}")
    if aside.exists():  # of a process that had our number
        disk.unlink(aside)
    fd = disk.create(aside)
    try:
        with naming(path):
            try:
                disk.write(fd, memoryview(data), 0)
                disk.fsync(fd)
            finally:
                disk.close(fd)
            disk.rename(aside, path)
    except BaseException:
        with suppress(OSError):
            disk.unlink(aside)
        raise
    disk.fsync_dir(path.parent)


def remove_tree(disk: Disk, folder: Path) -> None:
    """A folder with all it holds; what is gone already, or goes meanwhile, is no error."""
    with suppress(FileNotFoundError):
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                remove_tree(disk, entry)
            else:
                with suppress(FileNotFoundError):
                    disk.unlink(entry)
        disk.remove_dir(folder)


def holding(commit: Path) -> AbstractContextManager[None]:
    """Keeps a checkpoint while it is read, by its COMMIT file; all readers share it."""
    return lock.holding(commit, fcntl.LOCK_SH)


FENCE = ".generation"
"""In the folder of a trial: a number that each life of the learners raises before it restores.
Every save and commit carries the number of its own, and looks again before it counts."""
FIRST = 1
"""Of the life that finds no folder, and writes no file before it has something to save."""


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
    write_aside(disk, root / FENCE, str(generation).encode())
    return generation


def is_late(root: Path, generation: int | None) -> bool:
    """Whether a later generation has begun: what lies in the folders is no longer this one's."""
    return generation is not None and read_fence(root) > generation


def refuse_late(root: Path, generation: int | None) -> None:
    """RunError for a writer of an earlier generation; None: one that has no number."""
    if is_late(root, generation):
        raise RunError(
            f"{root}: written by generation {generation} of the learners, and "
            f"{read_fence(root)} has begun: nothing of it counts"
        )
