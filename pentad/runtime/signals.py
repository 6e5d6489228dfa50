"""The signals that stop a run: SIGINT (ctrl-C), SIGTERM, and SIGHUP (the terminal was closed)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded() -> list[signal.Signals]:
    """Not those the starter has us ignore, as nohup does SIGHUP."""
    return [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def hearing(stop: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Has `stop` called for every signal that is heeded; only the main thread hears."""
    before: dict[signal.Signals, object] = {}
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
