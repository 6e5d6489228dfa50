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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pentad.checkpoint.job import WriterJob, run_job
from pentad.core.errors import RunError
from pentad.runtime.helper import END, Channel, Helper
from pentad.runtime.process import NICENESS

log = logging.getLogger(__name__)


class Pending:
    """A submitted job."""

    def __init__(self) -> None:
        self.error: OSError | RunError | None = None
        """The error; None while the job runs."""
        self._done = threading.Event()
        self._result: dict[str, Any] = {}
        self._begun = self._ended = time.monotonic()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def is_whole(self) -> bool:
        """Whether the job is done without an error."""
        return self.is_done and self.error is None

    @property
    def seconds(self) -> float:
        """Seconds from submission until the job was done."""
        return (self._ended if self.is_done else time.monotonic()) - self._begun

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits for the result; raises the job's error, or TimeoutError."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"the writer is not done after {timeout:g} s")
        if self.error is not None:
            raise self.error
        return self._result

    def settled(self, timeout: float | None = None) -> None:
        """Waits until the job is done or has failed, at most for the given time."""
        self._done.wait(timeout)

    def settle(self, result: dict[str, Any], error: OSError | RunError | None = None) -> None:
        self._result, self.error, self._ended = result, error, time.monotonic()
        self._done.set()

    def settle_by(self, function: Callable[[], dict[str, Any]]) -> None:
        """Runs a function: its result or exception becomes that of the job."""
        try:
            self.settle(function())
        except (OSError, RunError) as error:
            self.settle({}, error)
        except Exception as error:  # whatever it is, it must not be waited for
            log.info("a job failed", exc_info=True)
            self.settle({}, RunError(f"{type(error).__name__}: {error}"))

    def outcome(self) -> dict[str, Any]:
        """Result of a finished write job as JSON: its files, or the error."""
        self._done.wait()
        error, system = self.error, None
        if isinstance(error, OSError) and error.errno is not None:
            system = [error.errno, error.strerror, error.filename]
        files = self._result.get("files", {})
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
                pending.settle({}, RunError("the run has ended, and its writer with it"))
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
