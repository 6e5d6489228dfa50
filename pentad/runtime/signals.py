"""The signals that stop a run: SIGINT (ctrl-C), SIGTERM, and SIGHUP (the terminal was closed)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 0.1
"""`timeout` and others send a signal to a process and then to its group: so soon it is the same."""


def heeded() -> list[signal.Signals]:
    """Not those the starter has us ignore, as nohup does SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


class Repeats:
    """Tells a signal that was sent twice from a second one."""

    def __init__(self) -> None:
        self.heard_at: dict[int, float] = {}

    def __call__(self, number: int) -> bool:
        now, before = time.monotonic(), self.heard_at.get(number)
        self.heard_at[number] = now
        return before is not None and now - before < SAME_S


@contextmanager
def hearing(stop: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Has `stop` called for every signal that is heeded; only the main thread hears."""
    before: dict[signal.Signals, object] = {}
    is_repeat = Repeats()
    if callable(stop):
        heard = stop

        def stop(number: int, frame: FrameType | None) -> None:
            if not is_repeat(number):
                heard(number, frame)

    for number in heeded():
        try:
            before[number] = signal.signal(number, stop)
        except ValueError:  # not the main thread: the caller handles signals
            continue
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
