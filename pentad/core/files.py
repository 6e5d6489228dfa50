"""Files and folders that are complete or absent: written under a temporary name and renamed.

Every operation that changes storage is a method of `Disk`, so that tests can record it or make it
fail; reads are not. The code assumes only that data is durable after `fsync`, a name after
`fsync_dir` of its folder, and that `rename` is atomic.
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
"""Temporary names beside a folder: its name, the state, and the writer's process id."""


class Disk:
    """Operations on the real disk. Paths are absolute; errors are OSError."""

    def make_dir(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> int:
        """Creates a file and opens it for writing; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def open_shared(self, path: Path) -> int:
        """Opens a file that several ranks write; creates it if it does not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Writes all data, with as many system calls as necessary."""
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
    """Creates a folder and missing parents; new names are durable when this returns."""
    if folder.is_dir():
        return
    make_folders(disk, folder.parent)
    try:
        disk.make_dir(folder)
    except FileExistsError:  # created by another rank
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
    """Writes or replaces a file atomically. With `is_durable` it survives a power failure once this
    returns."""
    aside = path.with_name(f".{path.name}.aside-{os.getpid()}")
    if aside.exists():  # left by a process with the same id
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
    """Yields an empty folder beside the target, locked while it is written. It replaces the target
    at the end of the context, or is removed after an exception; `sweep` removes folders of killed
    writers."""
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
            remove_tree(disk, old)  # left by an earlier call
            disk.rename(target, old)
        disk.rename(aside, target)
        disk.fsync_dir(target.parent)
    except BaseException:
        with suppress(OSError):
            if old.exists() and not target.exists():
                disk.rename(old, target)
        raise
    with suppress(OSError):  # the target is in place; the next sweep removes the rest
        sweep(target.parent, target.name, disk)


def is_being_written(target: Path) -> bool:
    """Whether a process is writing a folder that will be renamed to this path."""
    return any(map(is_held, target.parent.glob(f".{escape(target.name)}.writing-*")))


def sweep(root: Path, name: str | None = None, disk: Disk = REAL_DISK) -> list[Path]:
    """Removes folders of killed writers (their locks are not held) in `root`, by default of all
    targets, and returns them. A folder that was moved away for one that was never completed gets
    its name back."""
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
    """Removes a folder with its content, or a file. A missing one is ignored."""
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
