"""Small saves of two ranks and two roles, and disks that record, fail or forget operations."""

import json
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import metadata as dcp

from pentad.checkpoint.folders import COMMIT, MANIFEST, info_folder, state_folder
from pentad.checkpoint.job import (
    CommitJob,
    FileSpec,
    Memory,
    Piece,
    Span,
    WriteJob,
    WriterJob,
)
from pentad.core.files import Disk

Runner = Callable[[WriterJob], dict[str, Any]]
INFOS = ("step_info.json", "saver_info.json", "dataloader_info.json", "groups.bin")


def memory_of(data: bytes) -> Memory:
    memory = Memory(len(data))
    memory.view[:] = data
    return memory


def index_of(name: str) -> bytes:
    """An index as DCP writes it, of one object without tensors."""
    return pickle.dumps(dcp.Metadata({name: dcp.BytesStorageMetadata()}))


def write_job(root: Path, step: int, rank: int, role: str = "default") -> WriteJob:
    memory = memory_of(bytes([step, rank]) * 500)
    folder = state_folder(role, step)
    pieces = (
        Piece("model.a", (b"head", Span(memory, 0, 400), b"tail")),
        Piece("model.b", (Span(memory, 400, 600),)),
    )
    files = [FileSpec(f"{folder}/__{rank}_0.distcp", pieces)]
    if rank == 0:
        text = index_of(f"{role} at {step}")
        files.append(FileSpec(f"{folder}/.metadata", (Piece(".metadata", (text,)),)))
    return WriteJob(root, info_folder(step), tuple(files))


def commit_job(
    root: Path, step: int, results: Iterable[Mapping[str, Any]], **options: Any
) -> CommitJob:
    """`results` are those of the write jobs."""
    info = info_folder(step)
    files = []
    for name in INFOS:
        text = json.dumps({"global_step": step, "of": name}).encode()
        files.append(FileSpec(f"{info}/{name}", (Piece(name, (text,)),)))
    options = {"facts": {"world": 2}, **options}
    written = {path: file for one in results for path, file in one["files"].items()}
    return CommitJob(root, info, written, tuple(files), **options)


def write_jobs(root: Path, step: int, roles: tuple[str, ...] = ("default",)) -> list[WriteJob]:
    return [write_job(root, step, rank, role) for role in roles for rank in range(2)]


def save(
    run: Runner, root: Path, step: int, roles: tuple[str, ...] = ("default",), **options: Any
) -> dict[str, Any]:
    results = [run(job) for job in write_jobs(root, step, roles)]
    return run(commit_job(root, step, results, **options))


def data_files(root: Path, step: int) -> list[Path]:
    """All that the manifest of a step must name."""
    found = [path for path in root.rglob(f"globalstep{step}/*") if path.is_file()]
    return sorted(path for path in found if path.name not in (COMMIT, MANIFEST))


class QuickDisk(Disk):
    """Does not wait for the hardware."""

    def fsync(self, fd: int) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


class CountingDisk(QuickDisk):
    """Operations one at a time: `before` may raise in the place of one, `after` sees those done."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.count = 0

    def before(self, operation: str, *values: Any) -> None:
        pass

    def after(self, operation: str, *values: Any) -> None:
        pass

    @contextmanager
    def step(self, operation: str, *values: Any):
        with self.guard:
            self.before(operation, *values)
            self.count += 1
            yield
            self.after(operation, *values)

    def make_dir(self, path: Path) -> None:
        with self.step("make_dir", path):
            super().make_dir(path)

    def create(self, path: Path) -> int:
        with self.step("create", path):
            fd = super().create(path)
            self.created(fd, path)
            return fd

    def open_shared(self, path: Path) -> int:
        with self.step("open_shared", path):
            return super().open_shared(path)

    def created(self, fd: int, path: Path) -> None:
        pass

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        with self.step("write", fd, bytes(data), offset):
            super().write(fd, data, offset)

    def fsync(self, fd: int) -> None:
        with self.step("fsync", fd):
            pass

    def fsync_dir(self, path: Path) -> None:
        with self.step("fsync_dir", path):
            pass

    def rename(self, path: Path, target: Path) -> None:
        with self.step("rename", path, target):
            super().rename(path, target)

    def unlink(self, path: Path) -> None:
        with self.step("unlink", path):
            super().unlink(path)

    def remove_dir(self, path: Path) -> None:
        with self.step("remove_dir", path):
            super().remove_dir(path)


class FailingDisk(CountingDisk):
    """Fails operation number `at`, or all from there on."""

    def __init__(self, at: int, number: int, *, is_lasting: bool) -> None:
        super().__init__()
        self.at, self.number, self.is_lasting = at, number, is_lasting
        self.tried = 0

    def before(self, operation: str, *values: Any) -> None:
        self.tried += 1
        if self.tried == self.at or (self.is_lasting and self.tried > self.at):
            raise OSError(self.number, os.strerror(self.number))
