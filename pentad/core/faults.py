"""Named fault points: an environment variable makes a process fail at an exact place.

    PENTAD_FAULT="at=backward rank=2 step=3 do=kill note=/tmp/fault"

For `pentad chaos` and for experiments. Without the variable a point costs one dictionary lookup.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pentad.core.errors import Problem, UserError

VARIABLE = "PENTAD_FAULT"
POINTS = (
    *("forward", "backward", "all-reduce", "optimizer"),
    *("load", "write", "commit", "install", "generate"),
)
"""Points in a training step; in a restore and a save; in a sampler's install or sampling."""
ACTIONS = ("kill", "stop", "hold", "sleep", "raise", "full", "nan")
"""Send SIGKILL or SIGSTOP to itself; wait until NOTE.go exists; sleep; raise an exception; a full
disk; NaN in the gradient."""
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that is injected `times` times in total over all processes."""

    at: str
    do: str
    note: Path
    """NOTE.0, NOTE.1, ... are written at each injection, with process, rank, step and time."""
    rank: int | None = None
    step: int | None = None
    """Step, counted from 1; in a sampler the version of its weights."""
    times: int = 1
    """Number of injections; 0: unlimited."""
    seconds: float = 0.0

    def __str__(self) -> str:
        words = [f"at={self.at}", f"do={self.do}", f"note={self.note}", f"times={self.times}"]
        words += [f"rank={self.rank}"] if self.rank is not None else []
        words += [f"step={self.step}"] if self.step is not None else []
        return " ".join([*words, f"seconds={self.seconds:g}"])

    def claim(self, record: dict[str, Any]) -> bool:
        """Counts an occurrence; returns whether the fault is to be injected."""
        for number in range(self.times or 1):
            with suppress(FileExistsError):
                aside = self.note.with_name(f"{self.note.name}.{os.getpid()}")
                aside.write_text(json.dumps(record))
                try:
                    os.link(aside, f"{self.note}.{number}")  # atomic
                finally:
                    aside.unlink()
                return True
        return not self.times

    def happen(self, tensors: Iterable[Any]) -> None:
        match self.do:
            case "kill" | "stop":
                os.kill(os.getpid(), signal.SIGKILL if self.do == "kill" else signal.SIGSTOP)
            case "hold":
                while not self.note.with_name(f"{self.note.name}.go").exists():
                    time.sleep(POLL_S)
            case "sleep":
                time.sleep(self.seconds)
            case "raise":
                raise RuntimeError(f"{VARIABLE} requested a failure in {self.at}")
            case "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "nan":
                for tensor in tensors:
                    tensor.fill_(float("nan"))


@dataclass(slots=True)
class Where:
    """Rank and current step of this process."""

    rank: int = 0
    step: int | None = None


where = Where()


def is_armed() -> bool:
    return bool(os.environ.get(VARIABLE))


def check_armed() -> str | None:
    """A warning at the start of a run if faults are armed; UserError if they are invalid."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    read_faults(text)
    return f"{VARIABLE} is set, and faults will happen: {text}"


def hit(at: str, *, step: int | None = None, tensors: Iterable[Any] = ()) -> None:
    """Declares a fault point; `step` is needed if the process is not a rank."""
    text = os.environ.get(VARIABLE)
    if not text:
        return
    step = where.step if step is None else step
    for fault in read_faults(text):
        is_here = fault.at == at and fault.rank in (None, where.rank)
        if is_here and fault.step in (None, step):
            now = {"monotonic": time.monotonic(), "time": time.time()}
            if fault.claim({"pid": os.getpid(), "rank": where.rank, "step": step, **now}):
                fault.happen(tensors)


@cache
def read_faults(text: str) -> tuple[InjectedFault, ...]:
    return tuple(read_fault(part) for part in text.split(";") if part.strip())


def read_fault(text: str) -> InjectedFault:
    """Parses a fault; raises UserError for invalid text."""
    known = dict(word.partition("=")[::2] for word in text.split())

    def number(name: str) -> int | None:
        return int(known.pop(name)) if name in known else None

    try:
        fault = InjectedFault(
            known.pop("at"),
            known.pop("do"),
            Path(known.pop("note")),
            number("rank"),
            number("step"),
            times=int(known.pop("times", "1")),
            seconds=float(known.pop("seconds", "0")),
        )
    except (KeyError, ValueError) as error:
        raise refuse(text, f"{error} is missing or not a number") from error
    if fault.at not in POINTS or fault.do not in ACTIONS or known:
        raise refuse(text, f"at is of {', '.join(POINTS)}, do of {', '.join(ACTIONS)}")
    return fault


def refuse(text: str, rule: str) -> UserError:
    remedy = 'write it as "at=backward do=kill note=/tmp/fault rank=2 step=3", or unset it'
    return UserError(Problem(f"{VARIABLE} = {text.strip()}", rule, remedy))
