"""The background process that runs the jobs of a trainer process; `runtime.helper` starts it.

States and exports are written in order, in separate queues: a long export does not delay a later
state. Bytes are not copied: the process receives file descriptors of the memory and maps it. It
ends with its parent, even during a job, and ignores signals that a terminal or a scheduler sends to
all processes of a run.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pentad.checkpoint.job import WriterJob, run_job
from pentad.core.errors import RunError
from pentad.runtime.helper import END, Channel, Helper
from pentad.runtime.process import NICENESS

log = logging.getLogger(__name__)


class Pending(Future[dict[str, Any]]):
    """A submitted job: its result, or its OSError or RunError."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = time.monotonic()
        self._ended: float | None = None
        self.add_done_callback(self._note_end)

    def _note_end(self, _: Future[dict[str, Any]]) -> None:
        self._ended = time.monotonic()

    @property
    def is_whole(self) -> bool:
        """Whether the job is done without an error."""
        return self.done() and self.exception() is None

    @property
    def seconds(self) -> float:
        """Seconds from submission until the job was done."""
        return (self._ended or time.monotonic()) - self._begun

    def settle_by(self, function: Callable[[], dict[str, Any]]) -> None:
        """Runs a function: its result or exception becomes that of the job."""
        try:
            self.set_result(function())
        except (OSError, RunError) as error:
            self.set_exception(error)
        except Exception as error:  # whatever it is, it must not be waited for
            log.info("a job failed", exc_info=True)
            self.set_exception(RunError(f"{type(error).__name__}: {error}"))

    def outcome(self) -> dict[str, Any]:
        """Result of a finished write job as JSON: its files, or the error."""
        error, system = self.exception(), None
        if isinstance(error, OSError) and error.errno is not None:
            system = [error.errno, error.strerror, error.filename]
        files = {} if error else self.result().get("files", {})
        return {"files": files, "error": None if error is None else str(error), "system": system}


def failure_in(outcome: Mapping[str, Any]) -> OSError | RunError | None:
    """The error in the outcome of a job."""
    if outcome["error"] is None:
        return None
    return OSError(*outcome["system"]) if outcome["system"] else RunError(outcome["error"])


class Writer:
    """The writer as seen by its parent. The process starts with the first job, and again after a
    crash. After `close`, jobs fail: a thread that still runs must not write during the next run."""

    def __init__(self, stall_s: float | None = None) -> None:
        """A process that neither reads nor writes for `stall_s` during a job is killed, and its
        jobs fail with this reason. None: no limit."""
        self.stall_s = stall_s
        self._lock = threading.Lock()
        self._helper: Helper | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._helper is None else self._helper.child.pid

    def submit(self, job: WriterJob) -> Pending:
        """Submits a job and returns at once. The memory of its spans must not change until the job
        is done."""
        pending = Pending()
        with self._lock:
            if self._is_closed:
                pending.set_exception(RunError("the run has ended, and its writer with it"))
                return pending
            if self._helper is None or not self._helper.child.is_running:
                name = "the process that writes checkpoints"
                self._helper = Helper(name, f"{__name__}:serve", stall_s=self.stall_s)
            done = self._helper.call(job)
        done.add_done_callback(lambda done: pending.settle_by(done.result))
        return pending

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for jobs in progress; those that take longer than `timeout_s` fail."""
        with self._lock:
            helper, self._helper, self._is_closed = self._helper, None, True
        if helper is not None:
            helper.close(timeout_s)


def serve(channel: Channel) -> None:
    """Main loop of the process: runs jobs until the parent closes the writer or ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # a file beyond its size limit is an error, not a kill
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.nice(NICENESS)
    lanes = ThreadPoolExecutor(1), ThreadPoolExecutor(1)  # of states, of exports
    while (asked := channel.receive()) is not END:
        number, job = asked
        lanes[job.is_export].submit(channel.answer, number, run_job, job)
        del asked, job  # frees its memory
    for lane in lanes:
        lane.shutdown()
