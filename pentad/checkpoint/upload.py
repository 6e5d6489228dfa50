"""The uploader: sends committed checkpoints to a store during training.

A helper process that `tiers.py` starts: it receives steps and sends its state as events. It ends
with its parent and never ends a run: failures are counted, reported and retried later. A checkpoint
is uploaded when its COMMIT object exists, which is created once, after the HEAD of every object was
checked.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pentad.checkpoint.fetch import committed_steps, read_remote, step_of_key
from pentad.checkpoint.folders import (
    COMMIT,
    DAMAGED,
    MANIFEST,
    MAX_COMMIT_BYTES,
    READ_BYTES,
    Checkpoint,
    Damaged,
    FileEntry,
    commit_marker,
    info_folder,
    piece_sentence,
    prune,
    read_checkpoint,
)
from pentad.checkpoint.s3 import MAX_PARTS, Part, Store, StoreError, checksum_of
from pentad.core.errors import RunError
from pentad.runtime.helper import END, Channel
from pentad.runtime.process import NICENESS

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""First and longest pause in seconds between attempts to upload a checkpoint."""


class Taken(RunError):
    """The store has another checkpoint of the same step."""


@dataclass(slots=True)
class Sending:
    """An object being sent: its parts, and those not acknowledged yet."""

    path: str
    entry: FileEntry
    parts: list[Part]
    upload: str = ""
    tags: list[Future[str]] | None = None


def upload(store: Store, checkpoint: Checkpoint) -> None:
    """Sends missing objects, then manifest and COMMIT; raises RunError or OSError."""
    data = (checkpoint.root / checkpoint.info / MANIFEST).read_bytes()
    if is_taken(store, checkpoint, commit_marker(data)):
        return
    begun = store.uploads()
    with ThreadPoolExecutor(store.remote.num_workers) as pool:
        try:
            files = checkpoint.manifest.files.items()
            sending = [begin(store, checkpoint, path, one, begun, pool) for path, one in files]
            for one in sending:
                finish(store, one)
            list(pool.map(lambda one: check_object(store, one), sending))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    store.put(f"{checkpoint.info}/{MANIFEST}", data)
    marker = commit_marker(data)
    if not store.put_once(f"{checkpoint.info}/{COMMIT}", marker):
        is_taken(store, checkpoint, marker)


def is_taken(store: Store, checkpoint: Checkpoint, marker: bytes) -> bool:
    """Whether this checkpoint is committed in the store; raises Taken if another one is."""
    found = store.read(f"{checkpoint.info}/{COMMIT}", MAX_COMMIT_BYTES)
    if found not in (None, marker):
        place = store.place(checkpoint.info)
        rule = "holds a checkpoint of the same step that is not this run's"
        raise Taken(f"{place}: {rule}; is the trial running elsewhere? give another trial_name")
    return found is not None


def begin(
    store: Store,
    checkpoint: Checkpoint,
    path: str,
    entry: FileEntry,
    begun: dict[str, list[str]],
    pool: ThreadPoolExecutor,
) -> Sending:
    """Verifies a file while splitting it into parts, and starts to send missing parts."""
    head = store.head(path)
    if head is not None and (head.size, head.digest) == (entry.size, entry.sha256):
        return Sending(path, entry, [])
    place = checkpoint.root / path
    size = max(store.part_bytes, -(-entry.size // MAX_PARTS))
    sending = Sending(path, entry, plan_parts(place, entry, size))
    if len(sending.parts) == 1:
        sending.tags = [pool.submit(_send_whole, store, place, sending)]
        return sending
    ids = begun.get(path, [])
    for stale in ids[1:]:
        store.abort(path, stale)
    sending.upload = ids[0] if ids else store.begin(path, entry.sha256)
    known = store.sent_parts(path, sending.upload) if ids else {}
    sending.tags = [
        pool.submit(_send_part, store, place, sending, number, known.get(number))
        for number in range(1, len(sending.parts) + 1)
    ]
    return sending


def plan_parts(place: Path, entry: FileEntry, part_bytes: int) -> list[Part]:
    """Splits a file into parts with digests, verifying its pieces in the same pass; raises
    Damaged."""
    parts: list[Part] = []
    part, begin_at, at = hashlib.sha256(), 0, 0
    with place.open("rb", buffering=0) as file:
        for piece in entry.pieces:
            digest, end = hashlib.sha256(), piece.offset + piece.length
            while at < end:
                data = file.read(min(READ_BYTES, end - at, begin_at + part_bytes - at))
                if not data:
                    raise Damaged(f"{place}: ends after {at} bytes, and {entry.size} were written")
                digest.update(data)
                part.update(data)
                at += len(data)
                if at == begin_at + part_bytes:
                    parts.append(Part(begin_at, part_bytes, part.digest()))
                    part, begin_at = hashlib.sha256(), at
            if digest.hexdigest() != piece.sha256:
                raise Damaged(piece_sentence(place, piece))
        if file.read(1):
            raise Damaged(f"{place}: has more than the {entry.size} bytes that were written")
    if at > begin_at or not parts:
        parts.append(Part(begin_at, at - begin_at, part.digest()))
    return parts


def finish(store: Store, sending: Sending) -> None:
    tags = [one.result() for one in sending.tags or ()]
    if sending.upload:
        store.complete(sending.path, sending.upload, sending.parts, tags)


def check_object(store: Store, sending: Sending) -> None:
    """Compares an object's HEAD with the plan; raises StoreError."""
    head, entry = store.head(sending.path), sending.entry
    wanted = checksum_of(sending.parts) if sending.parts else ""
    if head is None or (head.size, head.digest) != (entry.size, entry.sha256):
        raise StoreError(f"{store.place(sending.path)}: the store does not have what was sent")
    if wanted and head.checksum not in ("", wanted):
        raise StoreError(f"{store.place(sending.path)}: the store has other bytes than were sent")


def _send_whole(store: Store, place: Path, sending: Sending) -> str:
    (part,) = sending.parts
    store.put(sending.path, _read(place, part), sending.entry.sha256)
    return ""


def _send_part(
    store: Store, place: Path, sending: Sending, number: int, known: dict[str, Any] | None
) -> str:
    """Sends a part, unless an earlier attempt sent it, and returns its ETag."""
    part = sending.parts[number - 1]
    data: bytes | None = None
    if known is not None and known["Size"] == part.length:
        checksum = known.get("ChecksumSHA256")
        if checksum is None:  # some stores do not list it; the ETag is then the MD5
            data = _read(place, part)
            same = known["ETag"].strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()
        else:
            same = checksum == checksum_of([part])
        if same:
            return str(known["ETag"])
    data = _read(place, part) if data is None else data
    return store.send_part(sending.path, sending.upload, number, data, part.sha256)


def _read(place: Path, part: Part) -> bytes:
    with place.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), part.length, part.offset)


def prune_remote(store: Store, keep_last: int) -> list[int]:
    """Removes checkpoints older than the newest `keep_last` complete ones, COMMIT first, and
    uncommitted uploads; returns the remaining steps. Removes nothing if none is complete."""
    by_step: dict[int, list[str]] = {}
    for key in store.sizes():
        step = step_of_key(key)
        if step is not None:
            by_step.setdefault(step, []).append(key)
    committed = committed_steps(key for keys in by_step.values() for key in keys)
    kept: list[int] = []
    for step in committed:
        if len(kept) < keep_last and _is_whole(store, step, by_step):
            kept.append(step)
    if not kept:
        return []
    for step, keys in by_step.items():
        is_left = step not in committed and f"{info_folder(step)}/{COMMIT}.{DAMAGED}" not in keys
        if step < kept[-1] or (step < kept[0] and is_left):
            store.delete([key for key in keys if key.endswith(f"/{COMMIT}")])
            store.delete(keys)
    for key, ids in store.uploads().items():
        step = step_of_key(key)
        if step is not None and step <= kept[0]:
            for one in ids:
                store.abort(key, one)
    return kept


def _is_whole(store: Store, step: int, by_step: dict[int, list[str]]) -> bool:
    """Whether the checkpoint is complete, judged without reading the data."""
    try:
        found = read_remote(store, step)
    except Damaged:
        return False
    return found is not None and set(found.manifest.files) <= set(by_step[step])


class Uploader:
    """Queue of checkpoints to upload. The newest is sent first, and makes older ones
    unnecessary."""

    def __init__(self, store: Store, root: Path, keep_last: int, emit: Callable[..., None]) -> None:
        self.store = store
        self.root = root
        self.keep_last = keep_last
        self.emit = emit
        self.changed = threading.Condition()
        self.waiting: set[int] = set()
        self.is_closing = False

    def add(self, step: int) -> None:
        with self.changed:
            self.waiting.add(step)
            self.changed.notify()

    def close(self) -> None:
        """Tries waiting checkpoints once more, then `run` returns."""
        with self.changed:
            self.is_closing = True
            self.changed.notify()

    def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while (found := self._next()) is not None:
            step, is_last_try = found
            failure = self._attempt(step)
            with self.changed:
                if failure is None or isinstance(failure, Taken | Damaged) or is_last_try:
                    self.waiting = {other for other in self.waiting if other > step}
                    pause_s = FIRST_PAUSE_S
                    continue
                self.changed.wait_for(partial(self._is_pressing, step), timeout=pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _is_pressing(self, step: int) -> bool:
        return self.is_closing or max(self.waiting) > step

    def _next(self) -> tuple[int, bool] | None:
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.is_closing)
            return (max(self.waiting), self.is_closing) if self.waiting else None

    def _attempt(self, step: int) -> Exception | None:
        text = f"the checkpoint of step {step + 1} is not uploaded"
        try:
            checkpoint = read_checkpoint(self.root, step)
            if checkpoint is None:
                raise Damaged(f"{self.root / info_folder(step)} is gone")
            began = time.monotonic()
            upload(self.store, checkpoint)
            self.emit(uploaded=step, seconds=time.monotonic() - began)
            text = "old checkpoints are not removed"
            self._prune()
        except (RunError, OSError) as error:
            self.emit(error=f"{text}: {error}")
            return error
        return None

    def _prune(self) -> None:
        """Removes local copies if the store has them or a newer checkpoint, complete."""
        kept = prune_remote(self.store, self.store.remote.retention)
        prune(self.root, self.keep_last, lambda local: bool(kept) and local.step <= kept[0])


def serve(channel: Channel) -> None:
    """Main loop of the process, until the parent sends END, or ends."""
    number, remote, root, keep_last = channel.receive()
    for one in (signal.SIGINT, signal.SIGTERM):  # for the run, which then closes this process
        signal.signal(one, signal.SIG_IGN)
    os.nice(NICENESS)
    store = Store(remote)

    def emit(**facts: Any) -> None:
        channel.send((None, {"bytes": store.num_bytes, **facts}))

    uploader = Uploader(store, root, keep_last, emit)
    threading.Thread(target=_listen, args=(channel, uploader), daemon=True).start()
    threading.Thread(target=_tick, args=(emit,), daemon=True).start()
    uploader.run()
    channel.send((number, None, None))


def _listen(channel: Channel, uploader: Uploader) -> None:
    try:
        while (step := channel.receive()) is not END:
            uploader.add(step)
        uploader.close()
        channel.receive()
    except EOFError:
        os._exit(0)  # the parent has ended; the next start continues the upload


def _tick(emit: Callable[..., None]) -> None:
    while True:
        time.sleep(1.0)
        emit()
