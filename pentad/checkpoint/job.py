"""Jobs of a writer: write files from lists of byte ranges, compute digests, and commit.

Needs neither torch nor numpy: a job runs in this process (`run_job`) or in a `Writer`'s.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pentad.checkpoint.fence import is_late, refuse_late
from pentad.checkpoint.folders import (
    COMMIT,
    INFO,
    MANIFEST,
    FileEntry,
    Manifest,
    PieceEntry,
    commit_marker,
    prune,
    step_of,
)
from pentad.core.errors import RunError, naming
from pentad.core.faults import hit
from pentad.core.files import REAL_DISK, Disk, make_folders, write_atomic
from pentad.runtime.helper import Descriptor, memory_file
from pentad.runtime.rank import pulse

NUM_THREADS = 4
"""Number of threads; each one hashes and writes whole pieces."""
CHUNK_BYTES = 8 << 20
"""Number of bytes hashed and written at once."""
POLL_S = 0.02
NUM_PARENTS = 4
"""Number of folders above the root that a run creates."""


class Memory:
    """Host memory that a writer process can map, too."""

    def __init__(self, size: int) -> None:
        with memory_file() as file:
            fd = os.dup(file.fileno())
        os.ftruncate(fd, size)
        self._hold(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)

    @classmethod
    def received(cls, fd: int) -> Memory:
        """Maps the memory of another process, read-only, while objects refer to it."""
        memory = cls.__new__(cls)
        memory._hold(fd, os.fstat(fd).st_size, mmap.PROT_READ)
        os.close(fd)
        memory.fd = -1
        return memory

    def __reduce__(self) -> tuple[Any, ...]:
        """A `Channel` sends the descriptor, not the bytes."""
        return Memory.received, (Descriptor(self.fd),)

    def _hold(self, fd: int, size: int, access: int) -> None:
        self.fd = fd
        self.size = size
        self._map = mmap.mmap(fd, max(size, 1), prot=access) if size else None
        self.view = memoryview(b"" if self._map is None else self._map)

    def close(self) -> None:
        """Closes it; the pages stay mapped while an object, such as a tensor, still refers to
        them."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.view = memoryview(b"")
        if self._map is not None:
            with suppress(BufferError):
                self._map.close()
            self._map = None


@dataclass(frozen=True, slots=True)
class Span:
    memory: Memory
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes of a file, read when they are written."""

    path: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Lazy:
    """Bytes that are made when they are written; they must stay valid until the same thread makes
    the next ones. Only for jobs that run in this process."""

    length: int
    make: Callable[[], memoryview]


FileSegment = bytes | Span | FileSpan | Lazy


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a file with a separate digest, such as those of one tensor."""

    name: str
    segments: tuple[FileSegment, ...]


@dataclass(frozen=True, slots=True)
class FileSpec:
    path: str
    """Path relative to the job's root."""
    pieces: tuple[Piece, ...]


class WriterJob(Protocol):
    """Interface of a job for a writer."""

    is_export: ClassVar[bool]
    """Whether it is an export: exports and states have separate queues (`Writer`)."""

    @property
    def where(self) -> Path:
        """The path that errors name."""
        ...

    def run(self, disk: Disk) -> dict[str, Any]:
        """Runs the job; the result has `files` (sizes by path)."""
        ...


@dataclass(frozen=True, slots=True)
class WriteJob:
    """Writes the files of one rank, durably. If it fails, they are removed."""

    is_export: ClassVar[bool] = False
    root: Path
    info: str
    """`recover_info/globalstepG`."""
    files: tuple[FileSpec, ...]
    generation: int | None = None
    """Generation of the learners (`checkpoint.fence`)."""

    @property
    def where(self) -> Path:
        return self.root / self.info

    def run(self, disk: Disk) -> dict[str, Any]:
        info = self.where
        refuse_late(self.root, self.generation)
        _refuse_committed(info)
        try:
            result = {"files": _write_files(self.root, self.files, disk)}
            hit("write", step=(step_of(info.name) or 0) + 1)
        except BaseException:
            if not is_late(self.root, self.generation):
                _give_back(self.root, [file.path for file in self.files], disk)
            raise
        return result


@dataclass(frozen=True, slots=True)
class CommitJob:
    """Commits the files of all ranks: writes small files, the manifest and COMMIT, then a hint for
    users, then removes older checkpoints. If it fails, all files of the step are removed."""

    is_export: ClassVar[bool] = False
    root: Path
    info: str
    """`recover_info/globalstepG`."""
    written: Mapping[str, Any]
    """Sizes and digests by path: the `files` of the write jobs of all ranks."""
    files: tuple[FileSpec, ...]
    failure: OSError | RunError | None = None
    """The error of a rank: the files of the others are removed, and it is raised."""
    facts: dict[str, Any] = field(default_factory=dict)
    visible_s: float = 10.0
    """Time limit for files of other machines to appear in a shared folder."""
    keep_last: int = 2
    keep_steps: tuple[int, ...] = ()
    """Steps whose checkpoints are never removed."""
    generation: int | None = None

    @property
    def where(self) -> Path:
        return self.root / self.info

    def run(self, disk: Disk) -> dict[str, Any]:
        info = self.where
        step = step_of(info.name)
        assert step is not None and self.info == f"{INFO}/{info.name}", self.info
        refuse_late(self.root, self.generation)
        _refuse_committed(info)
        try:
            if self.failure is not None:
                raise self.failure
            sizes = {path: int(value["size"]) for path, value in self.written.items()}
            check_written(self.root, sizes, self.visible_s)
            refuse_late(self.root, self.generation)
            make_folders(disk, info)
            files = {**self.written, **_write_files(self.root, self.files, disk)}
            entries = {path: FileEntry.from_json(value) for path, value in files.items()}
            facts = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **self.facts}
            manifest = Manifest(step, entries, facts).to_bytes()
            write_atomic(info / MANIFEST, manifest, disk)
            _settle_names(self.root, info, disk)
            hit("commit", step=step + 1)
            refuse_late(self.root, self.generation)
            write_atomic(info / COMMIT, commit_marker(manifest), disk)
        except BaseException:
            own = [*(file.path for file in self.files), f"{self.info}/{MANIFEST}"]
            # A later generation may have committed this step: then its files must not be removed.
            if not is_late(self.root, self.generation) and _is_withdrawn(info, disk):
                _give_back(self.root, [*self.written, *own], disk)
            raise
        return {"files": files, "notes": _tidy(self, disk)}


def run_job(job: WriterJob, disk: Disk = REAL_DISK) -> dict[str, Any]:
    """Runs a job in this process. Returns `bytes`, `ms` and `files` (sizes and digests by path),
    for a commit also `notes` on harmless failures after it. Raises OSError or RunError."""
    begun = time.monotonic()
    with naming(job.where):
        result = job.run(disk)
    num_bytes = sum(entry["size"] for entry in result["files"].values())
    return {**result, "bytes": num_bytes, "ms": round(1e3 * (time.monotonic() - begun), 3)}


def _refuse_committed(info: Path) -> None:
    if (info / COMMIT).exists():
        raise RunError(f"{info}: this checkpoint is committed and must not be rewritten")


def _settle_names(root: Path, info: Path, disk: Disk) -> None:
    """Syncs folders that other processes created: up to the root by other ranks, above it by the
    user who started the run (some may not be readable)."""
    for folder in _chain(root, info):
        disk.fsync_dir(folder)
    for folder in root.parents[:NUM_PARENTS]:
        with suppress(PermissionError):
            disk.fsync_dir(folder)


def _is_withdrawn(info: Path, disk: Disk) -> bool:
    """Whether the COMMIT of a failed save is removed for certain; data are removed only then."""
    try:
        if (info / COMMIT).exists():
            disk.unlink(info / COMMIT)
            disk.fsync_dir(info)
    except OSError:
        return False
    return True


def check_written(root: Path, sizes: Mapping[str, int], visible_s: float) -> None:
    """Raises RunError unless the files of all ranks exist with their written sizes."""
    deadline = time.monotonic() + visible_s
    for path, size in sizes.items():
        while not (root / path).exists():
            if time.monotonic() > deadline:
                raise RunError(
                    f"{root / path}: written by a rank, but not visible here after "
                    f"{visible_s:g} s; every rank must write to the same folder"
                )
            time.sleep(POLL_S)
        with (root / path).open("rb") as file:  # open makes network file systems refresh
            found_bytes = os.fstat(file.fileno()).st_size
        if found_bytes != size:
            raise RunError(f"{root / path}: has {found_bytes} bytes, not {size}")


def _tidy(job: CommitJob, disk: Disk) -> list[str]:
    """Cleans up after a commit, which stays valid if this fails."""
    notes = []
    try:
        hint = f"{job.info}/step_info.json"
        if any(file.path == hint for file in job.files):
            data = (job.root / hint).read_bytes()
            write_atomic(job.root / INFO / "step_info.json", data, disk)
    except OSError as error:
        notes.append(f"the hint was not written ({error})")
    try:
        kept = job.keep_steps
        prune(job.root, job.keep_last, lambda found: found.step not in kept, disk)
    except (OSError, RunError) as error:
        notes.append(f"older checkpoints were not removed ({error})")
    return notes


def _write_files(root: Path, files: tuple[FileSpec, ...], disk: Disk) -> dict[str, Any]:
    """Writes files and syncs them with their names; returns sizes and digests by path."""
    written: dict[str, Any] = {}
    for file in files:
        path = root / file.path
        make_folders(disk, path.parent)
        if path.exists():  # left by a failed save
            disk.unlink(path)
        with naming(path):
            written[file.path] = _write_file(path, file, disk).to_json()
    for folder in _chains(root, [file.path for file in files]):
        disk.fsync_dir(folder)
    return written


def _chain(root: Path, folder: Path) -> list[Path]:
    """The folder and those above it, up to the root."""
    return [folder, *folder.parents][: len(folder.parts) - len(root.parts) + 1]


def _chains(root: Path, paths: list[str]) -> list[Path]:
    """The folders of the files and their parents up to the root, deepest first: another rank may
    have created them without a sync yet."""
    found = {folder for path in paths for folder in _chain(root, (root / path).parent)}
    return sorted(found, key=lambda folder: (-len(folder.parts), folder))


def _write_file(path: Path, file: FileSpec, disk: Disk) -> FileEntry:
    fd = disk.create(path)
    try:
        entries = _write_pieces(fd, file.pieces, disk)
        disk.fsync(fd)
    finally:
        disk.close(fd)
    return FileEntry(sum(entry.length for entry in entries), tuple(entries))


def _write_pieces(fd: int, pieces: tuple[Piece, ...], disk: Disk) -> list[PieceEntry]:
    """Each thread hashes and writes whole pieces."""

    def write(piece: Piece, start: int) -> PieceEntry:
        digest = hashlib.sha256()
        end = start
        for part in _parts(piece):
            digest.update(part)
            disk.write(fd, part, end)
            pulse()
            end += len(part)
        return PieceEntry(piece.name, start, end - start, digest.hexdigest())

    lengths = [sum(_length(segment) for segment in piece.segments) for piece in pieces]
    starts = [0, *accumulate(lengths)][:-1]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        tasks = [pool.submit(write, *pair) for pair in zip(pieces, starts, strict=True)]
        try:
            return [task.result() for task in tasks]
        finally:
            pool.shutdown(cancel_futures=True)


def _parts(piece: Piece) -> Iterator[memoryview]:
    for segment in piece.segments:
        view = view_of(segment)
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def view_of(segment: FileSegment) -> memoryview:
    match segment:
        case bytes():
            return memoryview(segment)
        case Span():
            return segment.memory.view[segment.start : segment.start + segment.length]
        case FileSpan():
            with segment.path.open("rb") as file:
                file.seek(segment.start)
                data = file.read(segment.length)
            if len(data) < segment.length:
                raise RunError(f"{segment.path}: ended within a tensor; it was truncated")
            return memoryview(data)
        case _:
            return segment.make().cast("B")


def _length(segment: FileSegment) -> int:
    return len(segment) if isinstance(segment, bytes) else segment.length


def _give_back(root: Path, paths: Iterable[str], disk: Disk) -> None:
    """Removes the files and empty folders; what cannot be removed is left to the next start."""
    paths = list(paths)
    for path in paths:
        with suppress(OSError):
            disk.unlink(root / path)
    for folder in _chains(root, paths):
        if step_of(folder.name) is not None:
            with suppress(OSError):
                disk.remove_dir(folder)
