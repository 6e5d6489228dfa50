"""The background process that runs a trainer process's jobs: `python -m pentad.checkpoint.writer`.

States are written in their order, and exports beside them in theirs: a long export does not delay
the state of a later step. Their bytes are not copied: the process gets the memory's file
descriptors and maps them. It ends with its parent, even in the middle of a job, and ignores the
signals that a terminal or a scheduler sends to all processes of a run.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pentad.checkpoint.job import Memory, WriterJob, run_job
from pentad.core.errors import RunError
from pentad.runtime.process import NICENESS, Child, die_with_parent

log = logging.getLogger(__name__)

HEADER = struct.Struct("<Q?")
"""The number of a job, and whether it is an export; a message without file descriptors is the
end."""
MAX_FDS = 250
Lane = queue.SimpleQueue[tuple[int, list[int]] | None]
"""Jobs by number, with the file descriptors of their memory; None: the end."""


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
        """Whether the job is done and did not fail."""
        return self.is_done and self.error is None

    @property
    def seconds(self) -> float:
        """Seconds from submission until the job was done."""
        return (self._ended if self.is_done else time.monotonic()) - self._begun

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """The result, or the job's error; TimeoutError if it is not done by then."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"the writer is not done after {timeout:g} s")
        if self.error is not None:
            raise self.error
        return self._result

    def settled(self, timeout: float | None = None) -> None:
        """Waits until the job is done, successful or not, or for the given time."""
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
        if isinstance(error, OSError):
            system = [error.errno, error.strerror, error.filename]
        files = self._result.get("files", {})
        return {"files": files, "error": None if error is None else str(error), "system": system}


def failure_in(outcome: Mapping[str, Any]) -> OSError | RunError | None:
    """The error in the outcome of a job."""
    if outcome["error"] is None:
        return None
    return OSError(*outcome["system"]) if outcome["system"] else RunError(outcome["error"])


class Writer:
    """The parent's end of the writer. The process starts with the first job, and again after it was
    lost. After `close` jobs fail: a thread that is still running must not write beside the next
    run."""

    def __init__(self, stall_s: float | None = None) -> None:
        """A process that has a job and neither reads nor writes for `stall_s` is killed: its jobs
        fail with the reason. None: no limit."""
        self.stall_s = stall_s
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.child.pid

    def submit(self, job: WriterJob) -> Pending:
        """Submits a job and returns at once. The memory of its spans must not change until the job
        is done."""
        with self._lock:
            if self._is_closed:
                pending = Pending()
                pending.settle({}, RunError("the run has ended, and its writer with it"))
                return pending
            if self._process is None or not self._process.is_alive:
                self._process = _Process(self.stall_s)
            return self._process.send(job)

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for jobs in progress; those that take longer than `timeout_s` fail."""
        with self._lock:
            process, self._process, self._is_closed = self._process, None, True
        if process is not None:
            process.close(timeout_s)


class _Process:
    def __init__(self, stall_s: float | None = None) -> None:
        self._socket, theirs = socket.socketpair()
        environment = dict(os.environ)
        package = str(Path(__file__).parents[2])
        known = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = f"{known}{os.pathsep}{package}" if known else package
        command = [sys.executable, "-P", "-m", "pentad.checkpoint.writer"]
        with theirs:
            self.child = Child.start(
                [*command, str(theirs.fileno()), str(os.getpid())],
                environment=environment,
                pass_fds=[theirs.fileno()],
            )
        self._waiting: dict[int, Pending] = {}
        """By the number of the job."""
        self._numbers = itertools.count()
        self._guard = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="checkpoint-writer", daemon=True)
        self._reader.start()
        if stall_s is not None:
            given = stall_s, lambda: bool(self._waiting)
            threading.Thread(target=self.child.end_when_stalled, args=given, daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return self.child.is_running

    def send(self, job: WriterJob) -> Pending:
        pending = Pending()
        letter, memories = encode(job)
        fds = [memory.fd for memory in (letter, *memories)]
        assert len(fds) <= MAX_FDS, "a job has few memories"
        with self._guard:
            number = next(self._numbers)
            self._waiting[number] = pending
        try:
            header = HEADER.pack(number, job.is_export)
            socket.send_fds(self._socket, [header], fds)
        except OSError:
            self._fail()
        finally:
            letter.close()
        return pending

    def close(self, timeout_s: float | None) -> None:
        try:
            self._socket.sendall(HEADER.pack(0, False))  # no job: the end
            self.child.wait(timeout_s)
        except OSError:
            pass  # it is gone
        self.child.end()
        self._reader.join()

    def _read(self) -> None:
        with self._socket.makefile("rb") as answers:
            try:
                while True:
                    number, result, error = pickle.load(answers)
                    with self._guard:
                        pending = self._waiting.pop(number)
                    pending.settle(result, error)
            except (OSError, EOFError, pickle.UnpicklingError):
                pass  # it ended, perhaps within an answer
        self._fail()
        self._socket.close()

    def _fail(self) -> None:
        """Called when the process ended: jobs without an answer are lost."""
        self.child.wait()
        words = f"the process that writes checkpoints {self.child.ended()}"
        self.child.end()
        with self._guard:
            lost, self._waiting = self._waiting, {}
        for pending in lost.values():
            pending.settle({}, RunError(words))


def encode(job: WriterJob) -> tuple[Memory, list[Memory]]:
    """The pickled job, and the memory of its spans, which is sent as file descriptors."""
    memories: list[Memory] = []

    class JobPickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, Memory):
                return None
            if value not in memories:
                memories.append(value)
            return memories.index(value)

    data = io.BytesIO()
    JobPickler(data).dump(job)
    letter = Memory(data.tell())
    letter.view[:] = data.getbuffer()
    return letter, memories


def decode(letter: Memory, memories: list[Memory]) -> WriterJob:
    class JobUnpickler(pickle.Unpickler):
        def persistent_load(self, number: Any) -> Memory:
            return memories[number]

    job: WriterJob = JobUnpickler(io.BytesIO(letter.view)).load()
    return job


def main(fd: int, parent: int) -> None:
    """Runs jobs until the parent closes the connection or ends."""
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":  # a file that grows beyond its limit is an error, not the end
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.nice(NICENESS)
    lanes: tuple[Lane, Lane] = (queue.SimpleQueue(), queue.SimpleQueue())  # of state, of exports
    connection, guard = socket.socket(fileno=fd), threading.Lock()

    def work(lane: Lane) -> None:
        while (job := lane.get()) is not None:
            number, fds = job
            answer = pickle.dumps((number, *_answer(fds)))
            with guard:
                connection.sendall(answer)

    threading.Thread(target=_receive, args=(connection, lanes), daemon=True).start()
    threads = [threading.Thread(target=work, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _receive(connection: socket.socket, lanes: tuple[Lane, Lane]) -> None:
    """Receives also during a job, so that the end of the parent is noticed at once."""
    try:
        while True:
            data, fds, _, _ = socket.recv_fds(connection, HEADER.size, MAX_FDS)
            if not data:
                break
            number, is_export = HEADER.unpack(data)
            for lane in (lanes[is_export],) if fds else lanes:
                lane.put((number, list(fds)) if fds else None)
    finally:
        os._exit(1)


def _answer(fds: list[int]) -> tuple[dict[str, Any], OSError | RunError | None]:
    """Answers with the result of the job, or its error."""
    memories = [Memory.received(fd) for fd in fds]
    try:
        return run_job(decode(memories[0], memories[1:])), None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            return {}, OSError(error.errno, error.strerror or str(error), error.filename)
        is_known = isinstance(error, RunError | OSError)
        return {}, RunError(str(error) if is_known else f"{type(error).__name__}: {error}")
    finally:
        for memory in memories:
            memory.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
