"""Checkpoints on disk: manifests of committed checkpoints, their verification and their removal.

Only wrong bytes count as damage. A storage error or a manifest of a later version does not: it ends
the operation without changes.

The trial's root holds `ROLE/recover_checkpoint/globalstepG/` (state) and
`recover_info/globalstepG/` (everything else, `manifest.json` and `COMMIT`). A checkpoint exists
while its COMMIT holds the sha256 of its manifest; COMMIT is written last and removed first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentad.core.errors import RunError, visible
from pentad.core.files import REAL_DISK, Disk, remove_tree
from pentad.core.folders import INFO, STATE, step_of
from pentad.core.lock import is_held

FORMAT = 1
MANIFEST, COMMIT, DAMAGED = "manifest.json", "COMMIT", "damaged"
READ_BYTES = 4 << 20
RUN_BYTES = 64 << 20
NUM_READERS = 8
MAX_MANIFEST_BYTES = 1 << 30
MAX_COMMIT_BYTES = 4096
MAX_FILE_BYTES = 1 << 60
"""Largest valid size in a manifest; larger ones exceed file offsets."""

log = logging.getLogger(__name__)


class Damaged(RunError):
    """Bytes of a committed checkpoint differ from the written ones; names file and piece."""


class Missing(Damaged):
    """A file is missing."""


class LaterFormat(ValueError):
    """A manifest of a later version, which this version cannot read."""


class Unreadable(RunError):
    """The bytes of a checkpoint cannot be read, so it is left unchanged."""


@contextmanager
def from_storage(place: Path) -> Iterator[None]:
    """Context for reading files of a checkpoint: raises Missing for a missing file and Damaged for
    a path that is not a file. Other OS errors, and broken links (to an unmounted disk), raise
    Unreadable."""
    try:
        yield
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else place  # not a number
        text = f"{name}: cannot be read ({error.strerror or error})"
        if isinstance(error, FileNotFoundError) and (link := _link_to_nowhere(Path(name))):
            raise _unreadable(f"{link}: cannot be read (a link to nowhere)") from error
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise Missing(text) from error
        if isinstance(error, IsADirectoryError):
            raise Damaged(text) from error
        raise _unreadable(text) from error


def _unreadable(text: str) -> Unreadable:
    return Unreadable(
        f"{text}; its bytes may be intact, so no checkpoint was changed; start again "
        "when it can be read"
    )


def _link_to_nowhere(path: Path) -> Path | None:
    """The first symbolic link among this path and its parents with a missing target, or None."""
    return next((at for at in (path, *path.parents) if at.is_symlink() and not at.exists()), None)


def info_folder(step: int) -> str:
    return f"{INFO}/globalstep{step}"


def folder_of(role: str) -> str:
    """Name of the folder for a role's exports and states; `default` for the actor."""
    return "default" if role == "actor" else role


def state_folder(role: str, step: int) -> str:
    """The folder of a state, by role or by folder name."""
    return f"{folder_of(role)}/{STATE}/globalstep{step}"


@dataclass(frozen=True, slots=True)
class PieceEntry:
    """A range of bytes with a separate digest, such as one tensor's."""

    name: str
    offset: int
    length: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    pieces: tuple[PieceEntry, ...]
    """In file order, without gaps."""

    @property
    def sha256(self) -> str:
        """Digest over the digests of the pieces."""
        digests = b"".join(bytes.fromhex(piece.sha256) for piece in self.pieces)
        return hashlib.sha256(digests).hexdigest()

    def to_json(self) -> dict[str, Any]:
        pieces = [[p.name, p.offset, p.length, p.sha256] for p in self.pieces]
        return {"size": self.size, "sha256": self.sha256, "pieces": pieces}

    @classmethod
    def from_json(cls, value: Any) -> FileEntry:
        """Parses an entry; raises ValueError for anything that `to_json` would not write."""
        pieces = []
        end = 0
        for name, offset, length, digest in value["pieces"]:
            if not (isinstance(name, str) and type(offset) is type(length) is int):
                raise ValueError("a piece has no name, offset and length")
            if (
                offset != end
                or not 0 <= length <= MAX_FILE_BYTES
                or not re.fullmatch("[0-9a-f]{64}", digest)
            ):
                raise ValueError(f"piece {name!r} does not follow the one before it")
            end += length
            pieces.append(PieceEntry(name, offset, length, digest))
        entry = cls(end, tuple(pieces))
        if end > MAX_FILE_BYTES or value["size"] != end or value["sha256"] != entry.sha256:
            raise ValueError("size or digest do not fit the pieces")
        return entry


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of one checkpoint."""

    step: int
    """The last finished step, counted from 0."""
    files: Mapping[str, FileEntry]
    """Path relative to the trial's root -> entry."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """World, layout of each role, config digest, versions, time: JSON values."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def to_bytes(self) -> bytes:
        files = {path: entry.to_json() for path, entry in sorted(self.files.items())}
        body = {"format": FORMAT, "step": self.step, "facts": dict(self.facts), "files": files}
        return _canonical({**body, "digest": _digest(body)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parses a manifest; raises ValueError for anything that `to_bytes` would not write."""
        try:
            body = json.loads(data)
            digest = body.pop("digest")
            found = body["format"]
            if type(found) is int and found > FORMAT:
                raise LaterFormat(f"its format is {found}, and this version reads {FORMAT}")
            if found != FORMAT:
                raise ValueError(f"its format is {found!r}, not {FORMAT}")
            if digest != _digest(body):
                raise ValueError("its own digest does not fit its text")
            step = body["step"]
            for path in body["files"]:
                _check_path(path, step)
            files = {path: FileEntry.from_json(value) for path, value in body["files"].items()}
            if not isinstance(body["facts"], dict):
                raise ValueError("its facts are not a JSON object")
            return cls(step, files, body["facts"])
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is not a manifest ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: COMMIT matches the manifest; its files are not verified yet."""

    root: Path
    step: int
    manifest: Manifest
    suffix: str = ""
    """Suffix of its folders if it was set aside."""

    @property
    def info(self) -> str:
        """Folder of the small files, relative to the root."""
        return info_folder(self.step)

    def place(self, path: str) -> Path:
        """The path of a file of the manifest."""
        folder, _, name = path.rpartition("/")
        return self.root / f"{folder}{self.suffix}" / name

    def folders(self) -> list[Path]:
        """All folders with files of the checkpoint; the one with COMMIT is last."""
        parents = {str(Path(path).parent) for path in self.manifest.files} - {self.info}
        return [self.root / f"{path}{self.suffix}" for path in [*sorted(parents), self.info]]


def read_checkpoint(root: Path, step: int, suffix: str = "") -> Checkpoint | None:
    """The committed checkpoint of a step, or with a suffix one that was set aside. None without
    COMMIT; Damaged if it does not match; Unreadable if it cannot be read."""
    folder = root / f"{info_folder(step)}{suffix}"
    aside = folder / f"{COMMIT}.{DAMAGED}"
    commit = aside if suffix else folder / COMMIT
    try:
        marker = _read_small(commit, MAX_COMMIT_BYTES)
    except Missing:
        with from_storage(aside):
            is_half = not suffix and aside.exists()
        if is_half:
            text = "setting it aside or putting it back was interrupted"
            raise Damaged(f"{folder}: {text}") from None
        return None
    data = _read_small(folder / MANIFEST, MAX_MANIFEST_BYTES)
    if marker != commit_marker(data):
        raise Damaged(f"{commit}: does not hold the sha256 of {MANIFEST} beside it")
    return Checkpoint(root, step, read_manifest(data, folder / MANIFEST, step), suffix)


def read_manifest(data: bytes, place: Path | str, step: int) -> Manifest:
    """Raises Damaged unless it is the manifest of this step, Unreadable for a later format."""
    try:
        manifest = Manifest.from_bytes(data)
    except LaterFormat as error:
        raise Unreadable(
            f"{place}: {error}; no checkpoint was changed; use the version of Pentad that wrote it"
        ) from error
    except ValueError as error:
        raise Damaged(f"{place}: cannot be used: {error}") from error
    if manifest.step != step:
        raise Damaged(f"{place}: belongs to step {manifest.step}, not to {step}")
    return manifest


def find_checkpoints(
    root: str | Path, report: Callable[[str], None] = log.warning
) -> list[Checkpoint]:
    """Committed checkpoints, newest first; `report` receives a message for each one skipped. Raises
    Unreadable if the storage fails, because the list would be incomplete."""
    root = Path(root)
    found = []
    for step in list_steps(root):
        try:
            checkpoint = read_checkpoint(root, step)
        except Damaged as error:
            report(f"{error}; this checkpoint is skipped")
            continue
        if checkpoint is None:
            report(f"{root / info_folder(step)}: was never committed; it is skipped")
        else:
            found.append(checkpoint)
    return found


def list_steps(root: Path) -> list[int]:
    """Steps of the trial, newest first; includes steps that were never committed."""
    return _steps(root / INFO)[::-1]


def commit_marker(manifest: bytes) -> bytes:
    """The content of COMMIT."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def damage(checkpoint: Checkpoint) -> list[str]:
    """Verifies every byte; returns a message for each piece that differs from the written one."""
    files = checkpoint.manifest.files.items()
    with ThreadPoolExecutor(NUM_READERS) as pool:
        tasks = [
            pool.submit(lambda *task: list(file_damage(*task)), checkpoint.place(path), entry, run)
            for path, entry in files
            for run in _runs(entry)
        ]
        found = [sentence for task in tasks for sentence in task.result()]
    return list(dict.fromkeys(found))  # a wrong size is reported once per run


def read_file(checkpoint: Checkpoint, path: str) -> bytes:
    """The verified bytes of a file, by its path relative to the root; raises Damaged."""
    place, entry = checkpoint.place(path), checkpoint.manifest.files.get(path)
    if entry is None:
        raise Damaged(f"{place}: the checkpoint holds no such file")
    check_size(checkpoint, path)
    data = _read_small(place, entry.size)
    if len(data) != entry.size:
        raise Damaged(_size_sentence(place, len(data), entry.size))
    for piece in entry.pieces:
        part = memoryview(data)[piece.offset : piece.offset + piece.length]
        if hashlib.sha256(part).hexdigest() != piece.sha256:
            raise Damaged(piece_sentence(place, piece))
    return data


def read_json(checkpoint: Checkpoint, path: str) -> dict[str, Any]:
    """The JSON object of a file, verified; raises Damaged."""
    return json_object(read_file(checkpoint, path), checkpoint.place(path))


def json_object(data: bytes, place: Path) -> dict[str, Any]:
    """Parses a JSON object; raises Damaged for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{place}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise Damaged(f"{place}: is not a JSON object")
    return value


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Context for reading values of a verified file: a missing value or a wrong type raises
    Damaged. Do nothing else in it, or programming errors are reported as damage."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{type(error).__name__}: {visible(str(error))}"
        raise Damaged(f"{place}: does not have the content that a run saves ({what})") from error


def check_size(checkpoint: Checkpoint, path: str) -> None:
    """Compares a file's size with the manifest before memory is allocated; raises Damaged."""
    place, wanted = checkpoint.place(path), checkpoint.manifest.files[path].size
    with from_storage(place):
        found = place.stat().st_size
    if found != wanted:
        raise Damaged(_size_sentence(place, found, wanted))


def prune(
    root: str | Path,
    keep_last: int,
    may_delete: Callable[[Checkpoint], bool] = lambda checkpoint: True,
    disk: Disk = REAL_DISK,
) -> list[Path]:
    """Removes all but the newest `keep_last` checkpoints, and remains of unfinished saves."""
    assert keep_last >= 1, "the newest checkpoint is never removed"
    root = Path(root)
    found = find_checkpoints(root, report=lambda sentence: None)
    removed = []
    for checkpoint in found[keep_last:]:
        if may_delete(checkpoint) and not is_held(root / checkpoint.info / COMMIT):
            remove_checkpoint(checkpoint, disk)
            removed.append(root / checkpoint.info)
    newest = found[0].step if found else -1
    for step, folders in sorted(folders_by_step(root).items()):
        if step < newest and not (root / info_folder(step) / COMMIT).exists():
            for folder in folders:
                remove_tree(disk, folder)
    return removed


def remove_checkpoint(checkpoint: Checkpoint, disk: Disk = REAL_DISK) -> None:
    """Removes COMMIT first, durably, so that a crash leaves no checkpoint."""
    folder = checkpoint.root / checkpoint.info
    disk.unlink(folder / COMMIT)
    disk.fsync_dir(folder)
    for path in checkpoint.folders():
        remove_tree(disk, path)


def _runs(entry: FileEntry) -> Iterator[tuple[PieceEntry, ...]]:
    """Groups of pieces that one thread reads in sequence: about RUN_BYTES each."""
    run: list[PieceEntry] = []
    for piece in entry.pieces:
        run.append(piece)
        if piece.offset + piece.length - run[0].offset >= RUN_BYTES:
            yield tuple(run)
            run = []
    if run or not entry.pieces:
        yield tuple(run)


def file_damage(
    place: Path, entry: FileEntry, pieces: tuple[PieceEntry, ...] | None = None
) -> Iterator[str]:
    """Yields a message for each piece, by default of all, that differs from the written one."""
    try:
        fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        yield f"{place}: cannot be read ({error.strerror})"
        return
    try:
        size = os.fstat(fd).st_size
        if size != entry.size:
            yield _size_sentence(place, size, entry.size)
        buffer = memoryview(bytearray(min(READ_BYTES, max(entry.size, 1))))
        for piece in entry.pieces if pieces is None else pieces:
            if _read_digest(fd, piece, buffer) != piece.sha256:
                yield piece_sentence(place, piece)
    except OSError as error:
        yield f"{place}: cannot be read ({error.strerror})"
    finally:
        os.close(fd)


def _read_digest(fd: int, piece: PieceEntry, buffer: memoryview) -> str:
    digest = hashlib.sha256()
    done = 0
    while done < piece.length:
        want = min(len(buffer), piece.length - done)
        got = os.preadv(fd, [buffer[:want]], piece.offset + done)
        if got == 0:  # the file became shorter
            break
        digest.update(buffer[:got])
        done += got
    return digest.hexdigest()


def _size_sentence(path: Path, found: int, wanted: int) -> str:
    return f"{path}: has {found} bytes, and {wanted} were written"


def piece_sentence(path: Path | str, piece: PieceEntry) -> str:
    place = f"bytes {piece.offset} to {piece.offset + piece.length}"
    return (
        f"{path}: piece {visible(piece.name)} ({place}) does not have the digest it was saved with"
    )


def folders_by_step(root: Path) -> dict[int, list[Path]]:
    """Folders of each step; the info folder comes last."""
    roles = sorted(name for name in list_folders(root) if name[0] != "." and name != INFO)
    found: dict[int, list[Path]] = {}
    for parent in [*(root / role / STATE for role in roles), root / INFO]:
        for step in _steps(parent):
            found.setdefault(step, []).append(parent / f"globalstep{step}")
    return found


def _steps(folder: Path) -> list[int]:
    steps = (step_of(name) for name in list_folders(folder))
    return sorted(step for step in steps if step is not None)


def list_folders(folder: Path) -> list[str]:
    """Names of the folders in a folder, which may be missing; Unreadable if the storage fails."""
    try:
        with from_storage(folder), os.scandir(folder) as entries:
            return [entry.name for entry in entries if _is_folder(entry)]
    except Missing:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    if step_of(entry.name) is not None:
        return stat.S_ISDIR(entry.stat().st_mode)  # unlike is_dir, raises for a broken link
    return entry.is_dir()


def _read_small(path: Path, limit: int) -> bytes:
    """Reads a file of at most `limit` bytes; raises Damaged, Missing or Unreadable."""
    with from_storage(path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            data = file.read(limit + 1)
    if len(data) > limit:
        raise Damaged(f"{path}: has more than {limit} bytes")
    return data


def _check_path(path: str, step: int) -> None:
    """Checks that a path is in a folder of this step, within the root."""
    found = re.fullmatch(rf"(?:{INFO}|[^/.\0][^/\0]*/{STATE})/globalstep{step}/([^/\0]+)", path)
    if found is None or found[1] in (".", "..", COMMIT, MANIFEST) or not path.isprintable():
        raise ValueError(f"{path!r} is not a file of step {step}")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
