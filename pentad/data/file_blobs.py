"""Blobs as files of one folder, mapped by their readers: in memory (/dev/shm) for one machine, in a
folder that all machines see for several.

A file is written aside and renamed. Who made the folder holds a lock in it for as long as it lives,
so that the next run on the machine can remove what a killed one left in memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pentad.core.errors import RunError
from pentad.core.own_files import open_own
from pentad.data.packing import Buffer

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "pentad-store-"
LOCK = "owner"
NUM_FOLDERS = 64
"""Groups are spread over folders, by gid: one with thousands of files is slow to list."""


class FileBlobs:
    can_lose = False

    def __init__(self, folder: Path, lock: BinaryIO | None = None) -> None:
        self.folder = folder
        self.lock = lock
        """Held by who made the folder."""
        self.address = {"kind": "files", "folder": str(folder)}

    def keys(self, gids: Iterable[int]) -> list[str]:
        wanted = {str(gid) for gid in gids}
        found: list[str] = []
        for folder in {_subfolder(gid) for gid in wanted}:
            try:
                found += os.listdir(self.folder / folder)  # noqa: PTH208
            except FileNotFoundError as error:
                raise _gone(self.folder) from error
        return [name for name in found if name.partition(".")[0] in wanted]

    def put(self, key: str, data: Sequence[Buffer]) -> None:
        path = self._path(key)
        aside = path.with_name(f".{key}.{os.getpid()}")
        try:
            with aside.open("wb") as file:
                file.writelines(data)
            aside.rename(path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            size = sum(map(len, data))
            raise RunError(
                f"{size} bytes of samples cannot be written to {self.folder}: {error.strerror}"
            ) from error

    def get(self, keys: Sequence[str]) -> list[Any | None]:
        return [_mapped(self._path(key)) for key in keys]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        if self.lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.lock.close()
            self.lock = None

    def describe(self, key: str) -> str:
        return str(self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / _subfolder(key.partition(".")[0]) / key


def make_blobs(parent: Path | None = None) -> FileBlobs:
    """A fresh folder, in memory unless `parent` is given; it is removed at close."""
    if parent is None:
        parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    parent.mkdir(parents=True, exist_ok=True)
    remove_orphans(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    for number in range(NUM_FOLDERS):
        (folder / _subfolder(str(number))).mkdir()
    lock = (folder / f"{LOCK}.new").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)  # before the name by which `remove_orphans` finds it
    (folder / f"{LOCK}.new").rename(folder / LOCK)
    return FileBlobs(folder, lock)


def open_blobs(address: Mapping[str, Any]) -> FileBlobs:
    folder = Path(address["folder"])
    if not folder.is_dir():
        raise _gone(folder)
    return FileBlobs(folder)


def remove_orphans(parent: Path) -> None:
    """Removes folders of this user whose makers are gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = open_own(folder / LOCK)
        except OSError:  # it is another user's, or none of a run
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # its maker lives
            continue
        finally:
            os.close(lock)


def _gone(folder: Path) -> RunError:
    return RunError(
        f"the store {folder} is not here: the run that made it has ended, or the folder is not one "
        "that all machines see"
    )


def _subfolder(gid: str) -> str:
    return f"{int(gid) % NUM_FOLDERS:02d}"


def _mapped(path: Path) -> Any | None:
    """Private to the reader: what it changes in its arrays, nobody else sees."""
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        return None
