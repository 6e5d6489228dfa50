"""A run that failed for a reason that may pass is started again by itself: the facts that
`runtime.restarts` decides by, and how a run in one process is started again.

Over several ranks the scheduler starts new ones (`trainer.ranks`). A run in one process is started
again by the command line, in place of the present program: what a failure leaves in a process is
not known.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from pentad.checkpoint.folders import Unreadable, find_checkpoints
from pentad.config.schema import Config
from pentad.core.errors import Crashed, RunError, Transient, UserError
from pentad.runtime.rank import rank_from_environment
from pentad.runtime.restarts import Lost, RestartPolicy
from pentad.telemetry.log import log_to
from pentad.telemetry.runfolder import run_path
from pentad.telemetry.steps import read_lines
from pentad.trainer.preflight import AGAIN
from pentad.trainer.run_folders import checkpoint_path

log = logging.getLogger(__name__)


def policy_of(config: Config) -> RestartPolicy:
    """What this run is started again by; counts on where this program took another's place."""
    recover, elastic = config.recover, config.elastic
    policy = RestartPolicy(
        retries=recover.retries if recover.is_on else 0,
        slot_failures=elastic.slot_failures if elastic.enabled and recover.is_on else None,
        newest=newest_step(config),
    )
    if known := os.environ.get(AGAIN):
        policy.resume(known)
    return policy


def is_started_again(config: Config, policy: RestartPolicy, error: Exception) -> bool:
    """Of a run in one process that failed; the log has the reason."""
    is_of_code = not isinstance(error, RunError | UserError) or isinstance(error, Crashed)
    lost = Lost(
        kind="raised" if is_of_code else "died",
        cause=first_line(error),
        step=step_under_way(config),
        newest=newest_step(config),
    )
    decision = policy.decide(lost)
    if decision.why:
        with log_to(run_path_of(config) / "log.txt"):
            log.warning("the run failed: %s; %s", lost.cause, decision.why)
    return decision.action == "restart"


def first_line(error: Exception) -> str:
    text, name = str(error).partition("\n")[0], type(error).__name__
    return text if text and isinstance(error, RunError | UserError) else f"{name}: {text}"


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
        policy = policy_of(config)
        is_next = newest_step(config) >= 0 and is_started_again(config, policy, error)
    except Unreadable as unreadable:
        log.warning("the run is not started again: %s", unreadable)
        return
    if is_next:
        os.environ[AGAIN] = str(policy)
        replace_program()


def replace_program() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
