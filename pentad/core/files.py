"""Files and folders that are complete or absent: written under a temporary name and renamed.

Every operation that changes storage is a method of `Disk`, so that tests can record or fail any
one. Reading does not use it. Data is durable after `fsync`, a name in a folder after `fsync_dir` of
that folder; nothing else is relied on, except that `rename` is atomic.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from pentad.core.errors import naming
from pentad.core.lock import holding, is_held

FILE_MODE = 0o644
LEFT = re.compile(r"\.(?P<name>.+)\.(?P<state>writing|converting|replaced|removed)-[0-9]+")
"""Temporary names beside a folder: NAME, the purpose, and a number of the writer."""


class Disk:
    """The real disk. Paths are absolute; errors are those of the operating system."""

    def make_dir(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> int:
        """A new file, open for writing; an existing one is an error."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def open_shared(self, path: Path) -> int:
        """A file that several ranks write; the first one creates it."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Writes all of the data, in as many calls as necessary."""
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
    """Creates a folder with those above it; the names of new ones are durable when this returns."""
    if folder.is_dir():
        return
    make_folders(disk, folder.parent)
    try:
        disk.make_dir(folder)
    except FileExistsError:  # another rank was quicker
        if not folder.is_dir():
            raise
    disk.fsync_dir(folder.parent)


def write_atomic(
    path: Path,
    data: bytes | Iterable[bytes | memoryview],
    disk: Disk = REAL_DISK,
    *,
    is_durable: bool = True,
) -> None:
    """Writes a file atomically: it is complete or absent, and replaces an existing one. Unless
    disabled, it survives a power failure once this returns."""
    aside = path.with_name(f".{path.name}.aside-{os.getpid()}")
    if aside.exists():  # of a process that had our number
        disk.unlink(aside)
    fd = disk.create(aside)
    try:
        with naming(path):
            try:
                _write_parts(fd, (data,) if isinstance(data, bytes) else data, disk)
                if is_durable:
                    disk.fsync(fd)
            finally:
                disk.close(fd)
            disk.rename(aside, path)
    except BaseException:
        with suppress(OSError):
            disk.unlink(aside)
        raise
    if is_durable:
        disk.fsync_dir(path.parent)


def _write_parts(fd: int, parts: Iterable[bytes | memoryview], disk: Disk) -> None:
    offset = 0
    for part in parts:
        disk.write(fd, memoryview(part), offset)
        offset += len(part)


@contextmanager
def atomic_folder(target: Path, disk: Disk = REAL_DISK) -> Iterator[Path]:
    """An empty folder beside the target, locked while it is written. It takes the target's place
    when the body ends and is removed when the body raises; `sweep` removes one whose writer was
    killed."""
    make_folders(disk, target.parent)
    sweep(target.parent, target.name, disk)
    aside = target.with_name(f".{target.name}.writing-{os.getpid()}")
    disk.make_dir(aside)
    try:
        with holding(aside):
            yield aside
            place_folder(aside, target, disk)
    except BaseException:
        with suppress(OSError):
            remove_tree(disk, aside)
        raise


def place_folder(aside: Path, target: Path, disk: Disk = REAL_DISK) -> None:
    """Renames a folder to the target. If that fails, the old target stays."""
    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    try:
        if target.exists():
            remove_tree(disk, old)  # of an earlier one that was not removed
            disk.rename(target, old)
        disk.rename(aside, target)
        disk.fsync_dir(target.parent)
    except BaseException:
        with suppress(OSError):
            if old.exists() and not target.exists():
                disk.rename(old, target)
        raise
    with suppress(OSError):  # it is in place; the next sweep removes what is left
        sweep(target.parent, target.name, disk)


def is_being_written(target: Path) -> bool:
    """Whether a process is writing a folder that will be renamed to this path."""
    return any(map(is_held, target.parent.glob(f".{escape(target.name)}.writing-*")))


def sweep(root: Path, name: str | None = None, disk: Disk = REAL_DISK) -> list[Path]:
    """Removes folders of killed writers in `root` (`name`: writers of that target), and returns
    them: those whose lock is not held. A folder that was moved away for one that was never
    completed gets its name back."""
    left = [(path, found) for path in root.glob(".*-*") if (found := LEFT.fullmatch(path.name))]
    left = [(path, found) for path, found in left if name in (None, found["name"])]
    written = {
        found["name"] for path, found in left if found["state"] == "writing" and is_held(path)
    }
    swept = []
    for path, found in left:
        if found["name"] in written:
            continue
        if found["state"] == "replaced" and not (root / found["name"]).exists():
            disk.rename(path, root / found["name"])
        else:
            remove_tree(disk, path)
        swept.append(path)
    return swept


def remove_tree(disk: Disk, path: Path) -> None:
    """Removes a folder with its content, or a file. A missing one is no error."""
    with suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            disk.unlink(path)
            return
        for entry in sorted(path.iterdir()):
            remove_tree(disk, entry)
        disk.remove_dir(path)


def file_digest(path: Path) -> bytes:
    """Digest of all bytes of a file; takes about a second per gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()


def json_digest(values: Mapping[str, Any]) -> str:
    """Digest of JSON values, independent of the order of keys."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
