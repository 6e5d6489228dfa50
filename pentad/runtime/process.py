"""Starts processes that end with their parent, monitors and ends them, and reads the stacks of
their threads."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import IO, Any, Protocol, TypeVar

from pentad.runtime.awake import awake_s
from pentad.runtime.rank import pulse
from pentad.runtime.report import LOG_LINES, describe_exit, with_tail

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
FAILED = 1
NICENESS = 5
"""Niceness of background processes: training has priority."""
WATCH_S = 0.5
MARGIN_S = 10.0
"""How much earlier than the process that waits for it a stalled child is ended, in seconds."""
POLL_S = 0.02
KILLED_S = 30.0
"""How long the end of a killed process is waited for, in seconds. One in uninterruptible sleep does
not end before its system call returns, which may be never."""
UNKILLABLE = (
    "has not ended {:g} s later: a disk, a network file system or a driver does not return from a "
    "system call"
)


# In the child.


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(FAILED)
    if sys.platform != "linux":
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    os._exit(FAILED)


END_WITH_US = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
)


def bound(command: Sequence[str]) -> list[str]:
    """Returns a command whose process gets SIGTERM (15) when its parent ends."""
    return [command[0], "-c", END_WITH_US, *command] if sys.platform == "linux" else [*command]


BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "


def python_command(module: str, given: Mapping[str, Any]) -> list[str]:
    """The command that runs `main` of a module, with our import path and `given` as JSON."""
    paths = [path or str(Path.cwd()) for path in sys.path]
    code = f"{BOOT}from {module} import main; main()"
    return [sys.executable, "-c", code, *map(json.dumps, (given, paths))]


_looking = threading.Lock()


def frame_of(thread_id: int) -> FrameType | None:
    """Returns the stack frame of a thread, with garbage collection off: in CPython before 3.11.8 a
    collection within `_current_frames` can deadlock with a thread that ends."""
    with _looking:
        is_on = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread_id)
        finally:
            if is_on:
                gc.enable()


# In the parent.


class Starter:
    """Starts all child processes from one thread. The kernel kills a child with the thread that
    started it, and this thread lives as long as the program. Any thread may call it."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Starts the thread, also in a forked child, which has none of its parent's threads."""
        self.lock = threading.Lock()
        self.asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def __call__(self, start: Callable[[], T]) -> T:
        future: Future[T] = Future()
        with self.lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="starter", daemon=True)
                self.thread.start()
        self.asked.put((start, future))
        return future.result()

    def _work(self) -> None:
        while True:
            start, future = self.asked.get()
            try:
                future.set_result(start())
            except BaseException as error:  # raised in the caller
                future.set_exception(error)
            del start, future


starter = Starter()
os.register_at_fork(after_in_child=starter._begin)


class Started(Protocol):
    """The part of `subprocess.Popen` that a `Child` needs."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Waits for the exit; returns the exit code, negative for a signal. May be called again."""
        ...

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""
        ...


class Child:
    """A child process: it ends with this process, and is not reaped before `end`, so that no signal
    can reach another process with a reused pid."""

    def __init__(self, popen: Started, log: Path | None = None) -> None:
        self.popen = popen
        self.pid = popen.pid
        self.stdin: IO[Any] | None = getattr(popen, "stdin", None)
        self.stdout: IO[Any] | None = getattr(popen, "stdout", None)
        """Our ends of its pipes, if it has any."""
        self.log = log
        """File to which its output is appended."""
        self._code: int | None = None
        self._is_ended = False
        self._ending = threading.Lock()
        self._verdict = ""

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        log: Path | None = None,
        log_mode: int = 0o666,
        environment: Mapping[str, str] | None = None,
        **given: Any,
    ) -> Child:
        """Starts a process from any thread, in a separate session: signals of a terminal go to the
        run only. The process calls `die_with_parent`, or is started by a `bound` command. `given`:
        arguments of Popen."""
        if log is None:
            return cls._popen(command, environment, None, given)
        log.parent.mkdir(parents=True, exist_ok=True)
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, log_mode)
        try:
            given |= {"stdout": out, "stderr": subprocess.STDOUT}
            return cls._popen(command, environment, log, given)
        finally:
            os.close(out)

    @classmethod
    def connected(cls, command: Sequence[str], **given: Any) -> tuple[Child, socket.socket]:
        """Starts a process with one end of a socket pair, and returns the other. The descriptor and
        our process id are the last two arguments of its command."""
        ours, theirs = socket.socketpair()
        with theirs:
            words = [*command, str(theirs.fileno()), str(os.getpid())]
            return cls.start(words, pass_fds=[theirs.fileno()], **given), ours

    @classmethod
    def _popen(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        log: Path | None,
        given: dict[str, Any],
    ) -> Child:
        options = {"start_new_session": True, "stdin": subprocess.DEVNULL, **given}
        env = None if environment is None else dict(environment)
        return cls(starter(lambda: subprocess.Popen([*command], env=env, **options)), log)

    @property
    def code(self) -> int | None:
        """The exit code: None while it runs, negative if a signal ended it."""
        if self._code is None:
            if not hasattr(os, "waitid"):  # macOS before Python 3.13
                self._code = self.popen.poll()
                return self._code
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            try:
                found = os.waitid(os.P_PID, self.pid, options)
            except ChildProcessError:  # `end` on another thread has reaped it
                self._code = self.popen.wait()
                return self._code
            if found is not None:
                is_own = found.si_code == os.CLD_EXITED
                self._code = found.si_status if is_own else -found.si_status
        return self._code

    @property
    def is_running(self) -> bool:
        return self.code is None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP stopped it."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(") ")[2][:1] in ("T", "t")

    def ended(self) -> str | None:
        """Describes how it ended; None while it runs."""
        if (code := self.code) is None:
            return None
        return self._verdict or describe_exit(code)

    def poll(self, num_lines: int = LOG_LINES) -> str | None:
        """Describes how it ended, with the last lines of its output; None while it runs."""
        ended = self.ended()
        return None if ended is None else with_tail(ended, self.log, num_lines)

    def send(self, number: int) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    def send_all(self, number: int) -> None:
        """Sends a signal to all processes of its session."""
        with self._ending, suppress(ProcessLookupError, PermissionError):
            if not self._is_ended:
                os.killpg(self.pid, number)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, at most for the given time; returns whether it has ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.is_running:
            if deadline is not None and time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def end(self, verdict: str = "") -> None:
        """Kills it and all processes of its session at once; `verdict`: the reason, for `ended`.
        After `KILLED_S` it counts as ended."""
        with self._ending:
            if self._is_ended:  # its pid may be reused by now
                return
            if self.is_running:
                self._verdict = verdict
            if self._code is None or hasattr(os, "waitid"):  # else its pid may be reused
                for kill in (os.killpg, os.kill):  # it may not have a session yet
                    with suppress(ProcessLookupError, PermissionError):
                        kill(self.pid, signal.SIGKILL)
            self._code = self._reaped()
            self._is_ended = True

    def _reaped(self) -> int:
        """Returns the exit code of the killed process."""
        deadline, pause_s = time.monotonic() + KILLED_S, 0.0005
        while (code := self.popen.poll()) is None:
            if time.monotonic() > deadline:
                self._verdict = (
                    f"{self._verdict or 'was killed'}, and {UNKILLABLE.format(KILLED_S)}"
                )
                return -signal.SIGKILL
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)
        return code

    def end_when_stalled(self, stall_s: float, is_busy: Callable[[], bool]) -> None:
        """Waits until it has ended. Kills a busy process if the amounts it has read and written do
        not change for `stall_s`, less a margin; a change is progress of this process, which may be
        waiting for it, and is ended by its own monitor after `stall_s` without progress."""
        seen, since = "", awake_s()
        margin_s = min(stall_s / 4, MARGIN_S)
        while not self.wait(WATCH_S):
            done = io_of(self.pid) if is_busy() else ""
            if done != seen or not done:
                if done:
                    pulse()
                seen, since = done, awake_s()
            elif awake_s() - since > stall_s - margin_s:
                limit = f"stall_abort_s = {stall_s:g} s less {margin_s:g} s"
                self.end(f"was ended: it wrote nothing for {limit}")


def io_of(pid: int) -> str:
    """Bytes that a process has read and written so far; None if the system does not report it."""
    try:
        return Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return ""
