"""Failure reports of ranks, and which of several failures came first.

A failed rank makes others fail: they lose their connection or time out. Only the cause is reported.
"""

from __future__ import annotations

import os
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pentad.core.errors import Crashed, RunError, Transient, UserError
from pentad.runtime.rank import name_rank

CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|gloo|nccl|connectFullMesh"
    r"|DistBackendError|DistNetworkError|DistStoreError|TCPStore",
    re.IGNORECASE,
)
"""Error texts of a rank that lost its connection to another one."""
NUM_LINES = 12
"""Number of last lines of a rank's log in an error."""
LOG_LINES = 6
"""Number of last lines of another process's log."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank ended: reported by the rank, or found by the monitor."""

    rank: int
    step: int | None
    kind: Literal["user", "run", "bug", "died", "stuck", "away"]
    """user and run: the two errors for users; bug: any other exception; died: ended by a signal or
    without a report; stuck: did not respond; away: its slot was removed."""
    message: str
    at: float
    """Monotonic seconds."""
    problems: tuple[str, ...] = ()
    lines: tuple[str, ...] = field(default=())
    """The end of its traceback or log."""

    @property
    def is_consequence(self) -> bool:
        """Whether the loss of other ranks caused it; NCCL ends a process that waits too long."""
        if self.kind == "died":
            words = "\n".join(self.lines) if "SIGABRT" in self.message else ""
        else:
            words = self.message if self.kind in ("run", "bug") else ""
        return bool(CONSEQUENCE.search(words))


def describe_failure(rank: int, step: int | None, error: BaseException) -> Failure:
    """Converts an exception to the rank's report."""
    if isinstance(error, UserError):
        problems = tuple(str(problem) for problem in error.problems)
        return Failure(rank, step, "user", str(error), time.monotonic(), problems)
    frames = traceback.format_exception(error)
    lines = tuple("".join(frames).splitlines()[-NUM_LINES:])
    if isinstance(error, RunError):
        return Failure(rank, step, "run", str(error), time.monotonic(), lines=lines)
    message = f"{type(error).__name__}: {error}".strip()
    return Failure(rank, step, "bug", message, time.monotonic(), lines=lines)


def failure_of(value: Mapping[str, Any], **more: Any) -> Failure:
    """Reads a failure from a JSON value."""
    tuples = {key: tuple(value[key]) for key in ("problems", "lines")}
    return Failure(**{**value, **tuples, **more})


def first_failure(failures: list[Failure]) -> Failure:
    """Returns the failure that caused the others, in this order: a process that died without a
    report; the earliest exception that is not about lost peers; a rank that others waited for; the
    earliest failure."""
    assert failures, "a group fails with a reason"

    weights = {"away": -1, "died": 0, "user": 1, "run": 1, "bug": 1, "stuck": 2}

    def weight(failure: Failure) -> tuple[int, float]:
        return 3 if failure.is_consequence else weights[failure.kind], failure.at

    return min(failures, key=weight)


def explain(failures: list[Failure], world: int, logs: Sequence[Path]) -> Exception:
    """Returns the user-facing error of a failed group; `logs`: by rank."""
    cause = first_failure(failures)
    if cause.kind == "user":
        return UserError(cause.problems)
    is_common = [f.message for f in failures] == [cause.message] * world
    if cause.kind == "run" and is_common:
        return RunError(cause.message)  # not specific to a rank
    sentence = f"{name_rank(cause.rank, world, cause.step)}: {cause.message}"
    shown = "\n".join(f"    {line}" for line in cause.lines)
    if cause.is_consequence:
        kind: type[RunError] = Transient
    else:
        kind = {"run": RunError, "bug": Crashed}.get(cause.kind, Transient)
    if cause.kind == "run" or not shown:
        return kind(f"{sentence}\nIts log is {logs[cause.rank]}")
    return kind(f"{sentence}\n{shown}\nIts log is {logs[cause.rank]}")


STACKS = "stacks.txt"
"""File beside the logs of the ranks."""


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def save_stacks(logs: Sequence[tuple[str, Path]], sizes: Sequence[int]) -> None:
    """Collects the stacks of a hung group in one file: the part of each rank's log after its
    previous size. A stopped rank writes none."""
    parts = [time.strftime("# %Y-%m-%d %H:%M:%S")]
    for (name, log), size in zip(logs, sizes, strict=True):
        with log.open("rb") as file:
            file.seek(size)
            text = file.read().decode(errors="replace").strip()
        parts.append(f"## {name}\n{text or 'wrote nothing: it does not run'}")
    with (logs[0][1].parent / STACKS).open("a", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n\n")


def describe_exit(code: int) -> str:
    """Describes how a process ended, from its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    text = f"was ended by signal {-code} ({name})"
    if -code == signal.SIGKILL:
        text += ", as the system does when memory runs out"
    return text


def describe_hang(verb: str, step: int | None, waited_s: float, *, is_stopped: bool) -> str:
    """Describes a hung rank."""
    began = "it was started" if step is None else "its last step began"
    return f"{verb}{' (it is stopped)' if is_stopped else ''}, {began} {waited_s:.0f} s ago"


def tail(path: Path, num_lines: int = NUM_LINES) -> tuple[str, ...]:
    """Returns the last lines of a log without reading all of it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line for line in text.splitlines() if line.strip())[-num_lines:]


def with_tail(ended: str, log: Path | None, num_lines: int = LOG_LINES) -> str:
    """Adds the last lines of its log to the description of a process's end."""
    lines = " | ".join(line.strip() for line in tail(log, num_lines)) if log else ""
    return ended + (f"; the last lines of {log}: {lines}" if lines else "")
