"""How often a run that failed for a reason that may pass is started again by itself.

Over several ranks the launcher starts new ones. A run in one process is started again by the
command line, in place of the present program: what a failure leaves in a process is not known.
An exception of the code that comes twice at the same step is not waited out, nor any failure that
comes thrice there: the run ends with it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pentad.checkpoint.folders import Unreadable, find_checkpoints
from pentad.config.schema import Config
from pentad.core.errors import Crashed, RunError, Transient, UserError
from pentad.runtime.rank import rank_from_environment
from pentad.telemetry.log import log_to
from pentad.telemetry.runfolder import run_path
from pentad.telemetry.steps import read_lines
from pentad.trainer.preflight import AGAIN
from pentad.trainer.run_folders import checkpoint_path

log = logging.getLogger(__name__)

SAME_STEP = 3
"""Failures in a row at one step that show that the step is their cause."""


@dataclass(slots=True)
class Retries:
    config: Config
    used: int = 0
    step: int = -1
    """The last step that was committed when the last try began."""
    crash: str = ""
    """Stands for the exception and the step that ended the try before; empty: something else."""
    at: int | None = None
    """The step that ranks were in when the last try failed."""
    num_at: int = 0
    """Tries in a row that ended there."""

    @classmethod
    def of_this_program(cls, config: Config) -> Retries:
        if known := os.environ.get(AGAIN):
            used, step, crash = known.split(":")
            return cls(config, int(used), int(step), crash)
        return cls(config, step=newest_step(config))

    def __str__(self) -> str:
        return f"{self.used}:{self.step}:{self.crash}"

    @property
    def is_looping(self) -> bool:
        return self.at is not None and self.num_at >= SAME_STEP

    def diagnosis(self, error: Exception) -> str:
        """Why the run is given up, in words."""
        if not self.is_looping:
            return str(error)
        return (
            f"step {self.at} failed {self.num_at} times in a row, so its data or what it computes "
            f"is the likely cause, and the run is not started again; the last time: {error}"
        )

    def count(self, at: int | None) -> None:
        """A failure in this step; None: one that is no step's."""
        self.num_at = self.num_at + 1 if at is not None and at == self.at else 1
        self.at = at

    def take(self, error: Exception) -> bool:
        """Whether to start again, which it says with the reason."""
        newest, recover = newest_step(self.config), self.config.recover
        self.used, self.step = 0 if newest > self.step else self.used, newest
        if not recover.is_on or self.used >= recover.retries:
            return False
        before, self.crash = self.crash, crash_of(self.config, error)
        self.used += 1
        place = f"after step {newest + 1}" if newest >= 0 else "from the beginning"
        next_ = (
            f"it is started again {place} (try {self.used} of recover.retries = {recover.retries} "
            "without a step gained)"
        )
        if is_loop := bool(self.crash) and self.crash == before:
            next_ = "the try before ended at the same step in the same way: it is not started again"
        elif is_loop := self.is_looping:
            next_ = f"step {self.at} failed {self.num_at} times in a row: it is not started again"
        with log_to(run_path_of(self.config) / "log.txt"):
            log.warning("the run failed: %s; %s", first_line(error), next_)
        return not is_loop


def first_line(error: Exception) -> str:
    text, name = str(error).partition("\n")[0], type(error).__name__
    return text if text and isinstance(error, RunError | UserError) else f"{name}: {text}"


def crash_of(config: Config, error: Exception) -> str:
    """Stands for an exception of the code and the step it came in; empty for other failures."""
    if isinstance(error, RunError | UserError) and not isinstance(error, Crashed):
        return ""
    words = re.sub(r"^rank \d+ of \d+|0x[0-9a-f]+", "", first_line(error))
    step = step_under_way(config)
    return hashlib.blake2b(f"{step} {words}".encode(), digest_size=8).hexdigest()


def step_under_way(config: Config) -> int:
    """Of a run that trains: the one after the last that was recorded."""
    lines = read_lines(run_path_of(config) / "steps.jsonl")
    return max((line["step"] for line in lines), default=0) + 1


def run_path_of(config: Config) -> Path:
    return run_path(config.fileroot, config.experiment_name, config.trial_name, config.user)


def newest_step(config: Config) -> int:
    """Of the newest committed checkpoint; -1 without any."""
    found = find_checkpoints(checkpoint_path(config), report=log.debug)
    return found[0].step if found else -1


def start_again(config: Config, error: Exception) -> None:
    """Puts the same command in the place of this program if the failure may pass and there is a
    checkpoint to go on from; returns where it is final."""
    is_final = isinstance(error, RunError | UserError) and not isinstance(error, Transient)
    if is_final or rank_from_environment() is not None:
        return
    try:
        retries = Retries.of_this_program(config)
        is_next = newest_step(config) >= 0 and retries.take(error)
    except Unreadable as unreadable:
        log.warning("the run is not started again: %s", unreadable)
        return
    if is_next:
        os.environ[AGAIN] = str(retries)
        replace_program()


def replace_program() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
