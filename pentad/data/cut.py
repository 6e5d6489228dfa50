"""Interrupts code of a model folder, such as a chat template, that takes too long.

It limits the CPU time of the calling thread, so that a busy machine does not cause interruptions.
On systems without CPU time per thread (macOS) it limits elapsed time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

MAX_CPU_S = 5.0
GROWING_CPU_S = 0.3
MAX_GROWTH_BYTES = 1 << 28
"""Limit of the memory growth during a call, checked once the call has used GROWING_CPU_S."""
CHECK_S = 0.05
IDLE_CHECKS = 40
"""Number of checks without a call after which the watching thread ends; the next call starts a new
one."""


class CutOff(Exception):
    """The code took too long, or too much memory."""


@dataclass(slots=True, eq=False)
class _Call:
    thread: int = field(default_factory=threading.get_ident)
    clock: Callable[[], float] = field(init=False)
    began_s: float = field(init=False)
    began_bytes: int = field(init=False)
    is_cut: bool = False

    def __post_init__(self) -> None:
        self.clock = clock_of(self.thread)
        self.began_s = self.clock()
        self.began_bytes = _resident_bytes()  # here, as the watching thread may be delayed

    def is_too_much(self) -> bool:
        taken_s = self.clock() - self.began_s
        if taken_s < GROWING_CPU_S:
            return False
        return taken_s > MAX_CPU_S or _resident_bytes() - self.began_bytes > MAX_GROWTH_BYTES


def clock_of(thread: int) -> Callable[[], float]:
    """Returns a clock of a thread's CPU seconds that any thread can read."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    return partial(time.clock_gettime, time.pthread_getcpuclockid(thread))


class _Watch:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: set[_Call] = set()
        self.thread: threading.Thread | None = None

    def add(self, call: _Call) -> None:
        with self.lock:
            self.calls.add(call)
            if self.thread is None or not self.thread.is_alive():  # not copied by a fork
                self.thread = threading.Thread(target=self._look, name="cut-off", daemon=True)
                self.thread.start()

    def remove(self, call: _Call) -> None:
        with self.lock:  # later code is not interrupted
            self.calls.discard(call)
            if call.is_cut:
                _raise_in(call.thread, None)

    def _look(self) -> None:
        num_idle = 0
        while num_idle < IDLE_CHECKS:
            time.sleep(CHECK_S)
            with self.lock:
                num_idle = 0 if self.calls else num_idle + 1
                for call in [call for call in self.calls if call.is_too_much()]:
                    self.calls.discard(call)
                    call.is_cut = True
                    _raise_in(call.thread, CutOff)


def _raise_in(thread: int, kind: type[Exception] | None) -> None:
    """Raises an exception in a thread at its next operation; None revokes one that is still
    pending."""
    raised = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


_watch = _Watch()
os.register_at_fork(after_in_child=lambda: _watch.__init__())  # type: ignore[misc]


@contextlib.contextmanager
def cut_off() -> Iterator[None]:
    """Context that raises CutOff in its code if the code exceeds the limits."""
    call = _Call()
    _watch.add(call)
    try:
        yield
    finally:
        _watch.remove(call)


def _resident_bytes() -> int:
    """Resident memory; 0 on systems that do not report it."""
    path = Path("/proc/self/statm")
    pages = int(path.read_text().split()[1]) if path.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")
