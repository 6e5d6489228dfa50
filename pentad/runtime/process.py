"""Processes of a run: how one is bound to its starter's life, what its threads do, and how its
starter watches it and ends it."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Protocol

PR_SET_PDEATHSIG = 1
FAILED = 1
NICENESS = 5
"""Of processes that work beside training: its steps come first."""


def die_with_parent(parent: int) -> None:
    """The kernel ends this process when the thread that started it ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(FAILED)


_looking = threading.Lock()


def frame_of(thread_id: int) -> FrameType | None:
    """What a thread does now. Without collections meanwhile: in CPython before 3.11.8 one that
    frees a mapping within `_current_frames` deadlocks with a thread that ends."""
    with _looking:
        is_on = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread_id)
        finally:
            if is_on:
                gc.enable()


class Child(Protocol):
    @property
    def pid(self) -> int: ...

    def wait(self) -> int:
        """Its code, negative where a signal ended it; may be asked again."""
        ...


class RankProcess:
    """A process that keeps its number until `end`, so that no signal can reach another's."""

    def __init__(self, popen: Child) -> None:
        self.popen = popen
        self.pid = popen.pid
        self._code: int | None = None
        self._is_ended = False

    @property
    def code(self) -> int | None:
        """None while it runs; a signal's number, negative, if one ended it."""
        if self._code is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            try:
                found = os.waitid(os.P_PID, self.pid, options)
            except ChildProcessError:  # `end`, on another thread, is about to return
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
        """Whether a signal such as SIGSTOP halted it."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(") ")[2][:1] in ("T", "t")

    def send(self, number: int) -> None:
        if self.is_running:
            os.kill(self.pid, number)

    def end(self) -> None:
        """It and everything it started in its session."""
        if self._is_ended:  # its number may be another's by now
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._code = self.popen.wait()
        self._is_ended = True
