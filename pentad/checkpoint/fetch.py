"""Finds and fetches checkpoints in a store; every byte is verified."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pentad.checkpoint.folders import (
    COMMIT,
    DAMAGED,
    INFO,
    MANIFEST,
    MAX_COMMIT_BYTES,
    MAX_MANIFEST_BYTES,
    STATE,
    Checkpoint,
    Damaged,
    Manifest,
    PieceEntry,
    commit_marker,
    info_folder,
    piece_sentence,
    read_manifest,
    step_of,
)
from pentad.checkpoint.s3 import Gone, Store
from pentad.core.errors import RunError
from pentad.core.files import REAL_DISK, Disk, make_folders, remove_tree, write_atomic
from pentad.telemetry.log import NOTICE

SPAN_BYTES = 16 << 20
"""Neighbouring pieces up to this size share a request: one for each small tensor would be slow."""
TRIES = 3
"""Attempts for a range whose digest does not match: the bytes may have changed in transit."""

ASIDE = f"{COMMIT}.{DAMAGED}"
"""Name of COMMIT in the store if a checkpoint is set aside as damaged."""

log = logging.getLogger(__name__)
Notify = Callable[[str], None]
Write = Callable[[memoryview, int], None]


class Vanished(Damaged):
    """A checkpoint was removed from the store while it was read."""


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A committed checkpoint: COMMIT matches the manifest; its objects are not verified yet."""

    store: Store
    step: int
    manifest: Manifest
    data: bytes
    """The manifest as bytes."""

    @property
    def place(self) -> str:
        return self.store.place(info_folder(self.step))


def step_of_key(key: str) -> int | None:
    """The step that an object of a run belongs to; None for others."""
    found = re.fullmatch(rf"(?:{INFO}|[^/]+/{STATE})/([^/]+)/.+", key)
    return step_of(found[1]) if found else None


def committed_steps(keys: Iterable[str], mark: str = COMMIT) -> list[int]:
    """Steps among the keys with a COMMIT (or another `mark`), newest first."""
    found = {step_of_key(key) for key in keys if key.endswith(f"/{mark}")}
    return sorted((step for step in found if step is not None), reverse=True)


def read_remote(store: Store, step: int) -> RemoteCheckpoint | None:
    """The committed checkpoint of a step; None without COMMIT, Damaged if it does not match."""
    folder = info_folder(step)
    try:
        marker = store.read(f"{folder}/{COMMIT}", MAX_COMMIT_BYTES)
        if marker is None:
            return None
        data = store.read(f"{folder}/{MANIFEST}", MAX_MANIFEST_BYTES)
    except Gone as error:
        raise Damaged(str(error)) from error
    place = store.place(f"{folder}/{MANIFEST}")
    if data is None and store.head(f"{folder}/{COMMIT}") is None:
        return None  # it has been removed
    if data is None or marker != commit_marker(data):
        raise Damaged(f"{place}: does not have the sha256 that {COMMIT} beside it holds")
    return RemoteCheckpoint(store, step, read_manifest(data, place, step), data)


def read_aside(store: Store, step: int) -> RemoteCheckpoint:
    """Reads a checkpoint that was set aside; Damaged if its manifest is invalid."""
    place, data = store.place(path := f"{info_folder(step)}/{MANIFEST}"), store.read(path)
    if data is None:
        raise Damaged(f"{place}: is missing")
    return RemoteCheckpoint(store, step, read_manifest(data, place, step), data)


def put_back(found: RemoteCheckpoint) -> str:
    """Commits an intact checkpoint that was set aside; returns its address."""
    commit = f"{info_folder(found.step)}/{COMMIT}"
    if not found.store.put_once(commit, commit_marker(found.data)):
        raise RunError(f"{found.store.place(commit)}: is there already")
    found.store.delete([f"{commit}.{DAMAGED}"])
    return found.place


def remote_damage(found: RemoteCheckpoint) -> list[str]:
    """Reads every byte; returns a message for each object that is not as uploaded."""

    def sentence(path: str) -> str:
        try:
            _check_size(found, path)
            for span in _spans(found, path):
                _read_span(found, path, span, lambda data, offset: None)
        except Damaged as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(found.store.remote.num_workers) as pool:
        return [text for text in pool.map(sentence, found.manifest.files) if text]


def fetch(found: RemoteCheckpoint, root: Path, disk: Disk = REAL_DISK) -> Checkpoint:
    """Makes a verified local copy, COMMIT last; raises Damaged and leaves nothing."""
    local = Checkpoint(root, found.step, found.manifest)
    for folder in local.folders():
        remove_tree(disk, folder)  # of an unfinished fetch or save
        make_folders(disk, folder)
    try:
        with ThreadPoolExecutor(found.store.remote.num_workers) as pool:
            for path in found.manifest.files:
                _fetch_file(found, path, root / path, pool, disk)
        for folder in local.folders():
            disk.fsync_dir(folder)
        info = root / local.info
        write_atomic(info / MANIFEST, found.data, disk)
        write_atomic(info / COMMIT, commit_marker(found.data), disk)
    except BaseException:
        for folder in local.folders():
            remove_tree(disk, folder)
        raise
    return local


def set_aside(store: Store, step: int, name: str, why: str, mark: str = COMMIT) -> None:
    """Replaces COMMIT (or another `mark`) by COMMIT.NAME, which contains the reason; other objects
    stay."""
    folder = info_folder(step)
    store.put(f"{folder}/{COMMIT}.{name}", f"{why}\n".encode())
    store.delete([f"{folder}/{mark}"])


def give_up(store: Store) -> None:
    """Sets aside all committed checkpoints of a run that starts over."""
    keys = store.sizes(f"{INFO}/")
    for mark in (COMMIT, ASIDE):
        for step in committed_steps(keys, mark):
            set_aside(store, step, "superseded", "the run was started over", mark)


def fetch_newest(
    store: Store,
    root: Path,
    *,
    newer_than: int = -1,
    except_steps: Collection[int] = (),
    report: Notify = log.warning,
    steps: Sequence[int] | None = None,
) -> Checkpoint | None:
    """Fetches the newest intact checkpoint after a step, among the committed ones or `steps`;
    damaged ones are reported, set aside and skipped."""
    for step in committed_steps(store.sizes(f"{INFO}/")) if steps is None else steps:
        if step <= newer_than:
            return None
        if step in except_steps:
            continue
        began = time.monotonic()
        try:
            found = read_remote(store, step)
            local = None if found is None else fetch(found, root)
        except Vanished as error:
            report(str(error))
            continue
        except Damaged as error:
            place = store.place(info_folder(step))
            report(f"{error}; {place} is set aside and the one before it is used")
            set_aside(store, step, DAMAGED, str(error))
            continue
        except OSError as error:
            place = store.place(info_folder(step))
            raise RunError(f"{root}: cannot take {place} ({error}); make room there") from error
        if local is not None:
            size, seconds = local.manifest.num_bytes / 1e9, time.monotonic() - began
            place = store.place(info_folder(step))
            text = "fetched %s: %.3g GB in %.1f s, every byte verified"
            log.info(text, place, size, seconds, extra=NOTICE)
            return local
    return None


def _spans(found: RemoteCheckpoint, path: str) -> list[list[PieceEntry]]:
    """Groups neighbouring pieces to about SPAN_BYTES."""
    spans: list[list[PieceEntry]] = []
    size = SPAN_BYTES
    for piece in found.manifest.files[path].pieces:
        if size >= SPAN_BYTES:
            spans.append([])
            size = 0
        spans[-1].append(piece)
        size += piece.length
    return spans


def _fetch_file(
    found: RemoteCheckpoint, path: str, place: Path, pool: ThreadPoolExecutor, disk: Disk
) -> None:
    _check_size(found, path)
    fd = disk.create(place)
    try:
        waiting = [
            pool.submit(
                _read_span, found, path, span, lambda data, offset: disk.write(fd, data, offset)
            )
            for span in _spans(found, path)
        ]
        try:
            for one in waiting:
                one.result()
        finally:  # no thread may write into a closed file
            for one in waiting:
                one.cancel()
            for one in waiting:
                if not one.cancelled():
                    one.exception()
        disk.fsync(fd)
    finally:
        disk.close(fd)


def _check_size(found: RemoteCheckpoint, path: str) -> None:
    head, size = found.store.head(path), found.manifest.files[path].size
    place = found.store.place(path)
    if head is None:
        raise _lost(found, f"{place} is not there")
    if head.size != size:
        raise Damaged(f"{place}: has {head.size} bytes, and {size} were written")


def _lost(found: RemoteCheckpoint, why: str) -> Damaged:
    """The error for a missing object: Vanished if the whole checkpoint was removed."""
    if found.store.head(f"{info_folder(found.step)}/{COMMIT}") is None:
        return Vanished(f"{found.place} was removed while it was read")
    return Damaged(why)


def _read_span(found: RemoteCheckpoint, path: str, span: list[PieceEntry], write: Write) -> None:
    """Reads neighbouring pieces and passes their bytes on; Damaged for the first bad one."""
    first = span[0].offset
    length = span[-1].offset + span[-1].length - first
    for attempt in range(1, TRIES + 1):
        try:
            bad = _bad_piece(found.store.stream(path, first, length), span, write)
        except Gone as error:
            raise _lost(found, str(error)) from error
        if bad is None:
            return
        if attempt == TRIES:
            raise Damaged(piece_sentence(found.store.place(path), bad))


def _bad_piece(chunks: Iterator[bytes], span: list[PieceEntry], write: Write) -> PieceEntry | None:
    """The first piece with a wrong digest."""
    rest, bad = memoryview(b""), None
    for piece in span:
        digest, done = hashlib.sha256(), 0
        while done < piece.length:
            if not rest:
                rest = memoryview(next(chunks))
            part = rest[: piece.length - done]
            digest.update(part)
            write(part, piece.offset + done)
            done, rest = done + len(part), rest[len(part) :]
        if digest.hexdigest() != piece.sha256 and bad is None:
            bad = piece
    return bad
