"""Stopping a run: a signal ends it after the step in progress, with everything saved."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pentad.core.errors import Interrupted, RunError, Stopped
from pentad.runtime.signals import Repeats, handled_signals, handling_signals


@dataclass(slots=True)
class StopFlag:
    reason: str = ""
    """Name of the signal; empty until one arrives."""

    def request(self, reason: str) -> None:
        """Stores the first signal."""
        self.reason = self.reason or reason

    def check_complete(
        self, trained: int, planned: int, model: Path | None, *, next_start: str = ""
    ) -> None:
        """Raises if a run ended early, so that it does not look complete. `next_start`: describes
        where it resumes; empty: it cannot."""
        if trained < planned:
            saved = f"what was trained is saved in {model}; "
            saved += next_start or (
                f"to train it further, start with actor.path={model} and another trial_name"
            )
            rest = "nothing was trained" if model is None else saved
            raise stopped(self.reason, f"after {trained} of {planned} steps; {rest}")


def stopped(name: str, rest: str) -> RunError:
    """Returns the error of a run that a signal stopped."""
    return (Interrupted if name.endswith("SIGINT") else Stopped)(f"stopped by {name} {rest}")


def cut_short(name: str, step: int | None, saved: str, next_start: str = "") -> RunError:
    """Returns the error after a second signal. `saved`: the last export; `step`: None after the
    last."""
    where = "in the saves after the last step" if step is None else f"in step {step}"
    rest = f"{where}; what was trained since the last save is lost, "
    return stopped(f"a second {name}", rest + (next_start or saved))


class StoppedEarly(KeyboardInterrupt):
    """A signal before the first step. Derives from KeyboardInterrupt so that `except Exception`
    does not catch it."""


DescribeProgress = Callable[[], str]
"""Describes the progress of a run that ends before its first step."""


@contextmanager
def stop_early(describe_progress: DescribeProgress) -> Iterator[None]:
    """While active, a signal ends the run at once; at the first step other handlers replace it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedEarly(signal.Signals(number).name)

    try:
        with handling_signals(stop):
            yield
    except StoppedEarly as early:
        raise too_early(str(early), describe_progress) from None


def too_early(reason: str, describe_progress: DescribeProgress) -> RunError:
    return stopped(reason, f"before the first step; {describe_progress()}")


@contextmanager
def stop_flag(flag: StopFlag) -> Iterator[StopFlag]:
    """A flag for code that polls it; a second signal raises KeyboardInterrupt."""

    def stop(number: int, frame: FrameType | None) -> None:
        if flag.reason:
            raise KeyboardInterrupt
        flag.request(signal.Signals(number).name)

    with handling_signals(stop):
        yield flag


@contextmanager
def stop_on_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """For an event loop: the first signal sets the flag, a second one cancels the current task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    is_requested = False
    is_repeat = Repeats()

    def stop(number: signal.Signals) -> None:
        nonlocal is_requested
        if is_repeat(number):
            return
        if is_requested and task is not None:
            task.cancel()
        is_requested = True
        request_stop(number.name)

    before: dict[signal.Signals, object] = {}
    for number in handled_signals():
        handler = signal.getsignal(number)
        try:
            loop.add_signal_handler(number, stop, number)
        except (ValueError, RuntimeError):  # not the main thread: the caller handles signals
            continue
        before[number] = handler
    try:
        yield
    finally:
        for number, earlier in before.items():
            loop.remove_signal_handler(number)  # this drops the earlier handler
            signal.signal(number, earlier)  # type: ignore[arg-type]


@contextmanager
def stop_task_early(describe_progress: DescribeProgress) -> Iterator[None]:
    """Like `stop_early`, on an event loop: cancels the current task, which then cleans up."""
    task = asyncio.current_task()
    assert task is not None, "called from a task"
    reasons: list[str] = []

    def stop(name: str) -> None:
        reasons.append(name)
        task.cancel()

    try:
        with stop_on_signals(stop):
            yield
    except asyncio.CancelledError:
        if not reasons:
            raise
        task.uncancel()
        raise too_early(reasons[0], describe_progress) from None
