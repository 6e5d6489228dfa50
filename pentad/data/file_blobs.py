"""Blobs as memory-mapped files in a folder: in /dev/shm for one machine, in a shared folder for
several.

The folder is managed by `core.scratch`: the next run on the machine removes those left by killed
runs.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pentad.core.errors import RunError
from pentad.core.files import write_atomic
from pentad.core.scratch import scratch_folder, shared_memory
from pentad.data.packing import Buffer

PREFIX = "pentad-store-"
NUM_FOLDERS = 64
"""Number of folders over which groups are spread, by gid: a folder with thousands of files is slow
to list."""


class FileBlobs:
    patience_s = 0.0

    def __init__(self, folder: Path, owned: ExitStack | None = None) -> None:
        self.folder = folder
        self.owned = owned or ExitStack()
        """Removes the folder at close, in the process that created it."""
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
        try:
            write_atomic(self._path(key), data, is_durable=False)
        except OSError as error:
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
        self.owned.close()

    def describe(self, key: str) -> str:
        return str(self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / _subfolder(key.partition(".")[0]) / key


def make_blobs(parent: Path | None = None) -> FileBlobs:
    """Creates a folder, in /dev/shm unless `parent` is given; it is removed at close."""
    parent = parent or shared_memory()
    parent.mkdir(parents=True, exist_ok=True)
    owned = ExitStack()
    folder = owned.enter_context(scratch_folder(PREFIX, parent))
    for number in range(NUM_FOLDERS):
        (folder / _subfolder(str(number))).mkdir()
    return FileBlobs(folder, owned)


def open_blobs(address: Mapping[str, Any]) -> FileBlobs:
    folder = Path(address["folder"])
    if not folder.is_dir():
        raise _gone(folder)
    return FileBlobs(folder)


def _gone(folder: Path) -> RunError:
    return RunError(
        f"the store {folder} is not here: the run that made it has ended, or the folder is not "
        "shared by all machines"
    )


def _subfolder(gid: str) -> str:
    return f"{int(gid) % NUM_FOLDERS:02d}"


def _mapped(path: Path) -> Any | None:
    """Maps a file privately: changes to arrays are invisible to other processes."""
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        return None
