"""Running a conversion: file by file, in several processes, resumable, and found again.

Everything is written into a folder beside the target whose name tells what it will be. A file
that is finished leaves a note with its digest there, so a run that was stopped goes on where it
was. When all files are there the folder is renamed to the target, with a record of what it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from pentad.core.errors import Problem, RunError, UserError
from pentad.weights.hf import move_into_place, write_json
from pentad.weights.megatron.outputs import Notes, Output

RECORD = "pentad-convert.json"
NOTES, LOCK = ".finished", ".lock"
POLL_S = 0.2
FULL_BYTES = 1 << 20
"""A disk with less than that left is why a write failed."""

Build = Callable[[Any], Output]
"""Makes the output from its recipe, in whatever process; importable by name."""
Progress = Callable[[str, int, int], None]
"""What is being done, and bytes done of bytes in all."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One finished file, as its note tells it."""

    size_bytes: int
    digest: str
    notes: Notes


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def text_digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Source:
    """The files a conversion reads: cheap to compare by size and time, certain by digest."""

    stats: dict[str, list[int]]
    """Path -> size in bytes, time of change in nanoseconds."""
    digests: dict[str, str]


def stats_of(files: Mapping[str, Path]) -> dict[str, list[int]]:
    return {
        name: [stat.st_size, stat.st_mtime_ns]
        for name, path in sorted(files.items())
        for stat in [path.stat()]
    }


def read_source(files: Mapping[str, Path], progress: Progress) -> Source:
    """Digests every file; that takes one pass over the source."""
    stats = stats_of(files)
    total, done = sum(size for size, _ in stats.values()), 0
    digests = {}
    for name in stats:
        progress("reading the source", done, total)
        digests[name] = file_digest(files[name])
        done += stats[name][0]
    progress("reading the source", total, total)
    return Source(stats, digests)


@dataclass(frozen=True, slots=True)
class Record:
    """What a converted folder says of itself."""

    identity: str
    request: dict[str, Any]
    source: dict[str, Any]
    files: dict[str, list[Any]]
    """Path -> size in bytes, digest."""
    extra: dict[str, Any]


def read_record(folder: Path) -> Record | None:
    """The record of an earlier conversion; None where there is none, or one we cannot read."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = Record(**json.loads(path.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
        return None
    parts = (record.request, record.source, record.files, record.extra)
    return record if all(isinstance(part, dict) for part in parts) else None


def is_whole(folder: Path, record: Record) -> bool:
    """Every file is there with its size; contents were verified when they were written."""
    paths = [(folder / name, size) for name, (size, _) in record.files.items()]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def check_target(target: Path, *, force: bool) -> None:
    """Refuses a target that holds something else; nothing is ever written over by chance."""
    if not target.exists() or force:
        return
    if not target.is_dir():
        raise UserError(Problem(str(target), "is a file", "give a folder that does not exist yet"))
    if any(target.iterdir()):
        rule = "is there already and holds something else than this conversion"
        raise UserError(Problem(str(target), rule, "give another folder, or --force to replace it"))


@contextmanager
def open_aside(target: Path, identity: str) -> Iterator[Path]:
    """The folder beside the target that this conversion writes into, for one writer at a time."""
    aside = target.with_name(_aside_name(target, identity[:12]))
    aside.mkdir(parents=True, exist_ok=True)
    with (aside / LOCK).open("w") as lock:
        if not _is_free(lock):
            rule = "another conversion is writing it right now"
            raise UserError(Problem(str(target), rule, "wait for it to end"))
        try:
            yield aside
        except UserError:
            if not any(aside.glob(f"**/{NOTES}/*.json")):  # nothing there to go on from
                shutil.rmtree(aside)
            raise


def _aside_name(target: Path, identity: str) -> str:
    return f".{target.name}.converting-{identity}"


def _is_free(lock: TextIO) -> bool:
    """Takes the lock if nobody has it; it goes with the file, also when the process dies."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def check_space(aside: Path, output: Output) -> None:
    done = sum((aside / name).stat().st_size for name in output.files if (aside / name).exists())
    needed, free = sum(output.files.values()) - done, shutil.disk_usage(aside).free
    if needed > free:
        rule = f"the conversion needs {needed >> 20} MiB, the disk has {free >> 20} MiB left"
        raise UserError(Problem(str(aside.parent), rule, "make room, or give another folder"))


def write_files(
    output: Output,
    build: Build,
    recipe: Hashable,
    aside: Path,
    *,
    processes: int,
    progress: Progress,
) -> dict[str, Finished]:
    """Writes every file that is not finished yet; returns what all of them are.

    Other processes make the output anew: `build(recipe)`.
    """
    aside.mkdir(exist_ok=True)
    check_space(aside, output)
    finished = {}
    for name in output.files:
        known = read_note(aside, name)
        if known is not None:
            finished[name] = known
    todo = [name for name in output.files if name not in finished]
    total = sum(output.files.values())

    def show() -> None:
        paths = [p for name in output.files for p in (aside / name, _part(aside, name))]
        sizes = [path.stat().st_size for path in paths if path.exists()]
        progress("writing", min(sum(sizes), total), total)

    if processes == 1 or len(todo) < 2:
        for name in todo:
            show()
            finished[name] = write_one(output, aside, name)
    else:
        finished |= _in_processes(build, recipe, aside, todo, processes, show)
    progress("writing", total, total)
    return {name: finished[name] for name in output.files}


def _in_processes(
    build: Build,
    recipe: Hashable,
    aside: Path,
    todo: list[str],
    processes: int,
    show: Callable[[], None],
) -> dict[str, Finished]:
    """Spawned, not forked: the parent may have threads; each worker takes the next file."""
    context = multiprocessing.get_context("spawn")
    out = {}
    with ProcessPoolExecutor(min(processes, len(todo)), mp_context=context) as pool:
        jobs: dict[Future[Finished], str] = {
            pool.submit(_write_one_here, build, recipe, str(aside), name): name for name in todo
        }
        pending = set(jobs)
        try:
            while pending:
                done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for job in done:
                    out[jobs[job]] = job.result()
                show()
        except BrokenProcessPool as error:
            rule = "a worker process ended without a word, perhaps for want of memory"
            raise RunError(f"{aside}: {rule}; run it again with fewer processes") from error
        finally:
            for job in pending:
                job.cancel()
    return out


@lru_cache(maxsize=1)
def _output(build: Build, recipe: Hashable) -> Output:
    """Built once in each worker, which lives as long as the conversion."""
    return build(recipe)


def _write_one_here(build: Build, recipe: Hashable, aside: str, name: str) -> Finished:
    """What a worker is asked to do."""
    return write_one(_output(build, recipe), Path(aside), name)


def write_one(output: Output, folder: Path, name: str) -> Finished:
    """Writes one file under another name, verifies it, renames it, and leaves its note."""
    path, part = folder / name, _part(folder, name)
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        notes = output.write(name, part)
    except (OSError, RuntimeError) as error:  # torch's writer says a full disk with the latter
        is_full = shutil.disk_usage(part.parent).free < FULL_BYTES
        reason = "the disk is full" if is_full else str(error).split("\n")[0]
        rule = f"cannot be written ({reason}); run it again, and it goes on where it was"
        raise RunError(f"{path}: {rule}") from error
    finished = Finished(part.stat().st_size, file_digest(part), notes)
    part.replace(path)
    note = _note_path(folder, name)
    note.parent.mkdir(exist_ok=True)
    unfinished = note.with_suffix(".part")
    write_json(unfinished, asdict(finished))
    unfinished.replace(note)
    return finished


def _part(folder: Path, name: str) -> Path:
    return folder / f"{name}.part"


def _note_path(folder: Path, name: str) -> Path:
    return folder / NOTES / (name.replace("/", "%") + ".json")


def read_note(folder: Path, name: str) -> Finished | None:
    """What a finished file is, if it still is that: its digest is computed anew."""
    note, path = _note_path(folder, name), folder / name
    if not note.is_file() or not path.is_file():
        return None
    try:
        finished = Finished(**json.loads(note.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
        return None
    whole = path.stat().st_size == finished.size_bytes and file_digest(path) == finished.digest
    return finished if whole else None


def put_in_place(aside: Path, folder: Path, target: Path, record: Record) -> None:
    """Adds the record, takes the traces of the work away, and renames."""
    write_json(aside / RECORD, asdict(record))
    shutil.rmtree(folder / NOTES)
    (aside / LOCK).unlink()
    move_into_place(aside, target)
    for stale in target.parent.glob(_aside_name(target, "*")):
        with (stale / LOCK).open("w") as lock:
            if _is_free(lock):
                shutil.rmtree(stale)
