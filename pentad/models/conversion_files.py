"""The files of a conversion: written beside the target by several processes, renamed when complete.

A finished folder has a record of its source, which identifies a repeated request and reveals
changed files. An interrupted conversion leaves a hidden folder, which the next one removes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pentad.core.errors import Problem, RunError, Transient, UserError
from pentad.core.files import atomic_folder, file_digest, is_being_written
from pentad.weights.hf import write_json
from pentad.weights.megatron.outputs import Output

RECORD = "pentad-convert.json"
POLL_S = 0.2
FULL_BYTES = 1 << 20
"""A failed write with less free disk space than this is reported as a full disk."""

Build = Callable[[Any], Output]
"""Builds the output from its request in any process; importable by name."""
OnProgress = Callable[[str, int, int], None]
"""Called with the current work, bytes done, and bytes in total."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file of the output on disk."""

    size_bytes: int
    digest: str
    notes: Any
    """The notes from `Output.write` for `Output.finish`."""


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files of the source: compared by size and time first, and by digest."""

    stats: dict[str, list[int]]
    """Path -> size in bytes, time of change in nanoseconds."""
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class ConversionRecord:
    """The source and the files of a converted folder."""

    identity: str
    request: dict[str, Any]
    source: dict[str, Any]
    """Fields of `SourceFiles`."""
    files: dict[str, list[Any]]
    """Path -> size in bytes, digest."""
    extra: dict[str, Any]


def stats_of(files: Mapping[str, Path]) -> dict[str, list[int]]:
    stats = {name: path.stat() for name, path in sorted(files.items())}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def read_source(files: Mapping[str, Path], progress: OnProgress) -> SourceFiles:
    """Computes the digest of every file, in one pass over the source."""
    stats = stats_of(files)
    total, done = sum(size for size, _ in stats.values()), 0
    digests = {}
    for name in stats:
        progress("reading the source", done, total)
        digests[name] = file_digest(files[name]).hex()
        done += stats[name][0]
    progress("reading the source", total, total)
    return SourceFiles(stats, digests)


def read_record(folder: Path) -> ConversionRecord | None:
    """The record of an earlier conversion; None if there is none, or it cannot be read."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = ConversionRecord(**json.loads(path.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
        return None
    parts = (record.request, record.source, record.files, record.extra)
    return record if all(isinstance(part, dict) for part in parts) else None


def is_whole(folder: Path, record: ConversionRecord) -> bool:
    """Whether every file exists with its size; contents were verified when they were written."""
    paths = [(folder / name, size) for name, (size, _) in record.files.items()]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def check_target(target: Path, *, force: bool) -> None:
    """Raises UserError if the target has other content, unless `force`."""
    if not target.exists() or force:
        return
    if not target.is_dir():
        raise UserError(Problem(str(target), "is a file", "give a folder that does not exist yet"))
    if any(target.iterdir()):
        rule = "exists and is not the result of this conversion"
        raise UserError(Problem(str(target), rule, "give another folder, or --force to replace it"))


@contextmanager
def write_aside(target: Path) -> Iterator[Path]:
    """Yields an empty folder that is renamed to the target at the end of the context; UserError if
    another conversion writes the target."""
    if is_being_written(target):
        rule = "another conversion is writing it right now"
        raise UserError(Problem(str(target), rule, "wait for it to end"))
    with atomic_folder(target) as aside:
        yield aside


def check_space(folder: Path, output: Output) -> None:
    needed, free = sum(output.files.values()), shutil.disk_usage(folder).free
    if needed > free:
        rule = f"the conversion needs {needed >> 20} MiB, the disk has {free >> 20} MiB left"
        raise UserError(Problem(str(folder.parent), rule, "make room, or give another folder"))


def write_files(
    output: Output,
    build: Build,
    recipe: Hashable,
    folder: Path,
    *,
    pool: Executor | None,
    progress: OnProgress,
) -> dict[str, WrittenFile]:
    """Writes every file of the output, in the processes of `pool` if there is one. They build the
    output again: `build(recipe)`."""
    folder.mkdir(exist_ok=True)
    check_space(folder, output)
    total = sum(output.files.values())

    def show() -> None:
        paths = [path for name in output.files if (path := folder / name).exists()]
        progress("writing", min(sum(path.stat().st_size for path in paths), total), total)

    written = {}
    if pool is None or len(output.files) == 1:
        for name in output.files:
            show()
            written[name] = write_one(output, folder, name)
    else:
        write = partial(_write_one_here, build, recipe, folder)
        written = _in_processes(pool, write, list(output.files), folder, show)
    progress("writing", total, total)
    return written


def _in_processes(
    pool: Executor,
    write: Callable[[str], WrittenFile],
    names: list[str],
    folder: Path,
    show: Callable[[], None],
) -> dict[str, WrittenFile]:
    jobs = {name: pool.submit(write, name) for name in names}
    pending = set(jobs.values())
    try:
        while pending:
            done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for job in done:
                job.result()
            show()
    except Transient as error:
        remedy = "run it again with fewer processes, which take less memory"
        raise RunError(f"{folder}: {error}; {remedy}") from error
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: job.result() for name, job in jobs.items()}


@lru_cache(maxsize=1)
def _output(build: Build, recipe: Hashable) -> Output:
    """The output, built once in each worker process."""
    return build(recipe)


def _write_one_here(build: Build, recipe: Hashable, folder: Path, name: str) -> WrittenFile:
    """`write_one` in a worker process."""
    return write_one(_output(build, recipe), folder, name)


def write_one(output: Output, folder: Path, name: str) -> WrittenFile:
    path = folder / name
    try:
        notes = output.write(name, path)
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter for a full disk
        is_full = shutil.disk_usage(folder).free < FULL_BYTES
        reason = "the disk is full" if is_full else str(error).split("\n")[0]
        rule = f"cannot be written ({reason}); run it again; it starts from the beginning"
        raise RunError(f"{path}: {rule}") from error
    return WrittenFile(path.stat().st_size, file_digest(path).hex(), notes)


def write_record(folder: Path, record: ConversionRecord) -> None:
    write_json(folder / RECORD, asdict(record))
