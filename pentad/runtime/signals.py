"""The signals that stop a run: SIGINT (ctrl-C), SIGTERM, and SIGHUP (the terminal was closed)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 0.1
"""Tools like `timeout` send a signal to a process and then to its group: a repetition within this
time is the same signal."""


def handled_signals() -> list[signal.Signals]:
    """Returns the stop signals that the parent does not ignore (nohup ignores SIGHUP)."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


class Repeats:
    """Distinguishes one signal delivered twice from a second one."""

    def __init__(self) -> None:
        self.sent_at: dict[int, float] = {}

    def __call__(self, number: int) -> bool:
        now, before = time.monotonic(), self.sent_at.get(number)
        self.sent_at[number] = now
        return before is not None and now - before < SAME_S


@contextmanager
def handling_signals(
    stop: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> Iterator[None]:
    """Calls `stop` for every handled signal, once if it is delivered twice; only the main thread
    receives signals."""
    before: dict[signal.Signals, object] = {}
    is_repeat = Repeats()

    def handle(number: int, frame: FrameType | None) -> None:
        if callable(stop) and not is_repeat(number):
            stop(number, frame)

    for number in handled_signals():
        try:
            before[number] = signal.signal(number, handle if callable(stop) else stop)
        except ValueError:  # not the main thread: the caller handles signals
            continue
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
