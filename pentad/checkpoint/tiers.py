"""The tiers of a run's checkpoints: local folders, and a store if one is configured."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pentad.checkpoint.fence import holding
from pentad.checkpoint.folders import (
    COMMIT,
    Checkpoint,
    find_checkpoints,
    from_storage,
    info_folder,
    prune,
    step_of,
)
from pentad.checkpoint.quarantine import list_aside
from pentad.core.folders import INFO
from pentad.core.remote import Remote
from pentad.runtime.awake import awake_s
from pentad.runtime.helper import END, Helper
from pentad.runtime.signals import handling_signals

log = logging.getLogger(__name__)

POLL_S = 0.05
STOPPED_S = 10.0
"""Seconds that an upload at the end of a run may take after a signal."""


@dataclass(frozen=True, slots=True)
class UploadStatus:
    """The state of uploads."""

    last_step: int | None = None
    """Newest known step that is complete in the store."""
    waiting_step: int | None = None
    """Newest step that is not yet in the store."""
    num_bytes: int = 0
    """Bytes sent and acknowledged in this run."""
    num_failures: int = 0
    """Number of uploads of a checkpoint that failed after all retries; each is reported."""


class Tiers:
    """The checkpoints of rank 0: `find` at the start, `after_commit` for every checkpoint, `close`
    at the end.

    Without a `remote` there is no uploader, `find` reads the local folders only, and the committer
    prunes them. With one, the uploader prunes both tiers and the committer does not
    (`keep_committed`): a local copy is removed only when the store has it or a newer one.
    """

    def __init__(
        self,
        root: Path,
        remote: Remote | None = None,
        *,
        keep_last: int = 2,
        is_again: bool = False,
        report: Callable[[str], None] = log.warning,
    ) -> None:
        """`remote`: location of this run, with user, experiment and trial; `keep_last`: for local
        copies; `is_again`: a restart in this process, so the store has nothing newer."""
        self.root = root
        self.remote = remote
        self.keep_last = keep_last
        self.is_again = is_again
        self.report = report
        self.lock = threading.Lock()
        self.known = UploadStatus()
        self.held = ExitStack()
        self.fetched: set[int] = set()
        """Steps fetched from the store: if they could not be restored, fetching again does not
        help."""
        self.uploader: Helper | None = None
        self.is_closed = False
        if remote is not None:
            self._start(remote)

    def find(self) -> Checkpoint | None:
        """The newest committed checkpoint of both tiers, fetched if it is remote; or None."""
        self.held.close()
        found = self._find()
        if found is not None:  # keeps it until the first commit
            commit = found.root / found.info / COMMIT
            with from_storage(commit):
                self.held.enter_context(holding(commit))
        return found

    def set_aside(self) -> dict[str, int]:
        """Path -> step of checkpoints in both tiers that are set aside as damaged, newest first."""
        found = {
            str(self.root / f"{info_folder(step)}{suffix}"): step
            for step, suffix in list_aside(self.root)
        }
        if self.remote is not None:
            from pentad.checkpoint.fetch import ASIDE, committed_steps
            from pentad.checkpoint.s3 import Store

            store = Store(self.remote)
            for step in committed_steps(store.sizes(f"{INFO}/"), ASIDE):
                found[store.place(info_folder(step))] = step
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def _find(self) -> Checkpoint | None:
        local = find_checkpoints(self.root, self.report)
        newest = local[0] if local else None
        if self.remote is None:
            return newest
        from pentad.checkpoint.fetch import committed_steps, fetch_newest
        from pentad.checkpoint.s3 import Store, StoreError, is_passing

        step = -1 if newest is None else newest.step
        store = Store(replace(self.remote, max_attempts=2) if self.is_again else self.remote)
        steps: list[int] = []
        fetched = None
        try:
            steps = committed_steps(store.sizes(f"{INFO}/"))
            fetched = fetch_newest(
                store,
                self.root,
                newer_than=step,
                except_steps=self.fetched,
                report=self.report,
                steps=steps,
            )
        except StoreError as error:
            # The store may have intact copies of newer or locally damaged checkpoints.
            lacks = [n for n in (*steps, *(n for n, _ in list_aside(self.root))) if n > step]
            is_needed = newest is None or (lacks and not self.is_again)
            if is_needed or not (self.is_again or is_passing(error.__cause__)):
                raise
            self.report(
                f"{error}; the run resumes from its local checkpoint after step {step + 1}, which "
                "is uploaded when the store answers"
            )
        if fetched is not None:
            self.fetched.add(fetched.step)
            with self.lock:
                self.known = replace(self.known, last_step=fetched.step)
        elif newest is not None:
            self._hand_over(newest.step)  # it may never have been uploaded
        return fetched or newest

    def after_commit(self, step: int) -> None:
        """Submits a committed checkpoint to the uploader; returns at once and never raises."""
        self.held.close()
        self._hand_over(step)

    def _hand_over(self, step: int) -> None:
        if self.remote is None or self.is_closed:
            return
        with self.lock:
            self.known = replace(self.known, waiting_step=step)
        try:
            if self.uploader is None or not self.uploader.child.is_running:
                self._start(self.remote)
            assert self.uploader is not None, "it was started"
            self.uploader.tell(step)
        except OSError as error:
            self._learn({"error": f"the uploader cannot be started: {error}"})

    def make_room(self) -> list[int]:
        """Removes local checkpoints on a full disk, except the newest; with a store, only those for
        which it has the same or a newer step. Returns the removed steps."""
        stored = self.status().last_step
        limit = sys.maxsize if self.remote is None else -1 if stored is None else stored
        removed = prune(self.root, 1, lambda checkpoint: checkpoint.step <= limit)
        return [step for path in removed if (step := step_of(path.name)) is not None]

    def status(self) -> UploadStatus:
        with self.lock:
            return self.known

    def close(self, timeout_s: float = 600.0) -> bool:
        """Waits for uploads; returns whether the store has all checkpoints. A signal ends the wait
        within STOPPED_S, a second one at once. Missing checkpoints are reported, and uploaded by
        the next start of the run."""
        self.is_closed = True
        self.held.close()
        if self.uploader is None:
            return True
        self.uploader.tell(END)
        cut = self._wait(self.uploader, timeout_s)
        waiting = self.status().waiting_step
        if waiting is not None:
            rest = "it is on the local disk, and the next start of the run uploads it"
            assert self.remote is not None, "there is an uploader"
            place = f"{self.remote.uri}{f' ({cut} ended the upload)' if cut else ''}"
            self.report(f"the checkpoint of step {waiting + 1} is not in {place}; {rest}")
        return waiting is None

    def _wait(self, uploader: Helper, timeout_s: float) -> str:
        """Waits until the uploader has ended, or ends it. Returns the last signal, or ""."""
        names: list[str] = []
        deadline = awake_s() + timeout_s
        with handling_signals(lambda number, _: names.append(signal.Signals(number).name)):
            while not uploader.wait(POLL_S):
                if names:
                    deadline = min(deadline, awake_s() + STOPPED_S)
                if len(names) > 1 or awake_s() > deadline:
                    uploader.end()
        return names[-1] if names else ""

    @property
    def keep_committed(self) -> int:
        """Number of local checkpoints that a committer keeps; with a store, all."""
        return self.keep_last if self.remote is None else sys.maxsize

    def _start(self, remote: Remote) -> None:
        learn = partial(self._learn, num_before=self.status().num_bytes)
        target = "pentad.checkpoint.upload:serve"
        self.uploader = Helper("the uploader", target, on_event=learn)

        def note_end(ended: Future[None]) -> None:
            if not self.is_closed and (lost := ended.exception()) is not None:
                learn({"error": f"{lost}; the next checkpoint starts it again"})

        self.uploader.call(remote, self.root, self.keep_last).add_done_callback(note_end)

    def _learn(self, facts: dict[str, Any], num_before: int = 0) -> None:
        """Updates the status from the uploader's messages; `num_before`: bytes that earlier
        uploaders sent."""
        with self.lock:
            known = self.known
            if "bytes" in facts:
                known = replace(known, num_bytes=num_before + facts["bytes"])
            if "error" in facts:
                known = replace(known, num_failures=known.num_failures + 1)
            if "uploaded" in facts:
                step, waiting = facts["uploaded"], known.waiting_step
                is_left = waiting is not None and waiting > step
                known = replace(known, last_step=step, waiting_step=waiting if is_left else None)
            self.known = known
        if "error" in facts:
            self.report(facts["error"])
