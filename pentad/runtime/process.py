"""One process of a group as its watcher sees it: whether it runs, how it ended, and its end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class Child(Protocol):
    @property
    def pid(self) -> int: ...

    def wait(self) -> int: ...


class RankProcess:
    """A process that keeps its number until `end`, so that no signal can reach another's."""

    def __init__(self, popen: Child) -> None:
        self.popen = popen
        self.pid = popen.pid
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """None while it runs; a signal's number, negative, if one ended it."""
        if self._code is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            found = os.waitid(os.P_PID, self.pid, options)
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
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()
