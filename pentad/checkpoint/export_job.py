"""Jobs of an export: every rank writes its blocks into the files of a folder, which is then
renamed.

The files are laid out beforehand (`weights.hf.FolderPlan`), so ranks write without waiting for each
other. Needs neither torch nor numpy: jobs run in this process or in that of a `Writer`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pentad.checkpoint.job import (
    NUM_THREADS,
    FileSegment,
    check_written,
    view_of,
)
from pentad.core import lock
from pentad.core.errors import RunError, naming
from pentad.core.files import Disk, make_folders, place_folder, remove_tree
from pentad.runtime.rank import pulse
from pentad.weights.regions import Runs

COMPARED_BYTES = 1 << 18
FLUSH_BYTES = 128 << 20
"""Number of bytes after which the file is flushed to disk."""


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Bytes that one rank writes into a file that several ranks may write."""

    path: str
    """Path relative to the job's folder."""
    runs: Runs
    content: FileSegment
    """The bytes. Lazy ones are read twice (to write and to compare), by several threads."""


@dataclass(frozen=True, slots=True)
class ExportJob:
    """Writes the blocks of one rank into the files of a folder, durably; each is read back and
    compared. After a failure a `PlaceJob` removes the files, because other ranks may still be
    writing."""

    is_export: ClassVar[bool] = True
    aside: Path
    """The temporary folder into which all ranks write."""
    blocks: tuple[BlockSpec, ...]

    @property
    def where(self) -> Path:
        return self.aside

    def run(self, disk: Disk) -> dict[str, Any]:
        by_file: dict[str, list[BlockSpec]] = {}
        for block in self.blocks:
            by_file.setdefault(block.path, []).append(block)
        make_folders(disk, self.aside)
        with lock.holding(self.aside, fcntl.LOCK_SH):  # marks the folder as in use
            for path, blocks in by_file.items():
                with naming(self.aside / path):
                    _write_blocks(self.aside / path, blocks, disk)
            disk.fsync_dir(self.aside)
        sizes = {path: sum(one.runs.num_bytes for one in found) for path, found in by_file.items()}
        return {"files": {path: {"size": size} for path, size in sizes.items()}}


def _write_blocks(path: Path, blocks: list[BlockSpec], disk: Disk) -> None:
    """Writes all blocks before reading any back: a file that other machines also write is never
    open for both, which could overwrite their parts with stale pages. Flushes run in the
    background."""
    with ThreadPoolExecutor(NUM_THREADS) as pool, ThreadPoolExecutor(1) as flusher:
        fd, flushes, waiting = disk.open_shared(path), [], 0
        try:

            def write(block: BlockSpec) -> int:
                view = view_of(block.content)
                assert len(view) == block.runs.num_bytes, f"{path}: a block of {len(view)} bytes"
                for offset, start, stop in block.runs.parts():
                    disk.write(fd, view[start:stop], offset)
                pulse()
                return len(view)

            for num_bytes in pool.map(write, blocks):
                waiting += num_bytes
                if waiting >= FLUSH_BYTES:
                    flushes.append(flusher.submit(disk.fsync, fd))
                    waiting = 0
            flushes.append(flusher.submit(disk.fsync, fd))
            if not all(pool.map(partial(_is_written, path), blocks)):
                raise RunError(f"{path}: does not read back as written; the disk is at fault")
            for flush in flushes:
                flush.result()
        finally:
            flusher.shutdown(cancel_futures=True)
            disk.close(fd)


def _is_written(path: Path, block: BlockSpec) -> bool:
    """Whether the file contains the block's bytes; compares pieces that fit the CPU cache."""
    pulse()
    view = view_of(block.content)
    with path.open("rb", buffering=0) as file:
        number = file.fileno()
        return all(
            os.pread(number, min(COMPARED_BYTES, stop - at), offset + at - start)
            == bytes(view[at : min(at + COMPARED_BYTES, stop)])
            for offset, start, stop in block.runs.parts()
            for at in range(start, stop, COMPARED_BYTES)
        )


@dataclass(frozen=True, slots=True)
class PlaceJob:
    """Renames a folder that all ranks have written to `target`. If that fails, or a rank failed,
    the temporary folder is removed and an old target is kept."""

    is_export: ClassVar[bool] = True
    aside: Path
    target: Path
    sizes: Mapping[str, int]
    """Bytes of each file."""
    failure: OSError | RunError | None = None
    """The error of a rank that failed; None if all succeeded."""
    visible_s: float = 10.0
    """Time limit for files of other machines to appear in a shared folder."""

    @property
    def where(self) -> Path:
        return self.target

    def run(self, disk: Disk) -> dict[str, Any]:
        try:
            if self.failure is not None:
                raise self.failure
            check_written(self.aside, self.sizes, self.visible_s)
            disk.fsync_dir(self.aside)
            place_folder(self.aside, self.target, disk)
        except BaseException:
            with suppress(OSError):
                remove_tree(disk, self.aside)
            raise
        return {"files": dict.fromkeys(self.sizes, {"size": 0})}
