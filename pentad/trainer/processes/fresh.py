"""A one-process run in a fresh process, where a failure has left this one unusable: a CUDA error,
or a call that does not return.

This process keeps the command, passes signals on and waits. The other one is
`python -m pentad.trainer.processes.fresh`; it gets the job and what is counted of restarts over a
pipe, and answers with the summary of the run or with what it failed with.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pentad
from pentad.core.device import reset_gpus
from pentad.core.errors import RunError, Transient
from pentad.core.machine import flush_output
from pentad.runtime.process import Child, die_with_parent
from pentad.runtime.restarts import RestartPolicy
from pentad.runtime.signals import handling_signals
from pentad.trainer.context import RunSummary
from pentad.trainer.processes.resources import RunResources
from pentad.trainer.processes.supervisor import RunJob, Supervisor, Unusable
from pentad.trainer.run_folders import describe_progress
from pentad.trainer.stopping import too_early

RESET_S = 15.0
"""Time limit for the GPUs to free the memory of this process, in seconds."""


class Died(Transient):
    """The fresh process ended without an answer; this process decides how to continue."""


def run_in_fresh_processes(job: RunJob, policy: RestartPolicy) -> RunSummary:
    """Runs the rest of the run in fresh processes; a process that becomes unusable is followed by
    the next."""
    check_gpus_free()
    while True:
        answer = ask_fresh_process(job, policy)
        if isinstance(answer, RunSummary):
            return answer
        if isinstance(answer, RestartPolicy):
            policy = answer
            continue
        if isinstance(answer, Died) and policy.restarts_after(str(answer)):
            continue
        raise answer


def check_gpus_free() -> None:
    """Raises if a kernel that never ends keeps this process's GPU memory."""
    resetting = threading.Thread(target=reset_gpus, daemon=True)
    resetting.start()
    resetting.join(RESET_S)
    if resetting.is_alive():
        rule = "the GPU does not give back the memory of a kernel that does not end"
        raise RunError(f"{rule}; start the command again, and the run resumes from its checkpoint")


def ask_fresh_process(job: RunJob, policy: RestartPolicy) -> Any:
    """Returns a summary, the policy if that process became unusable too, or an exception."""
    ours, theirs = Pipe()
    names: list[str] = []
    path = os.pathsep.join([str(Path(pentad.__file__).parents[1]), *filter(None, sys.path)])
    with ours, theirs:
        child = Child.start(
            [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
            environment={**os.environ, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

        def pass_on(number: int, frame: FrameType | None) -> None:
            names.append(signal.Signals(number).name)
            child.send(number)

        with handling_signals(pass_on):
            try:
                ours.send((job, policy))
                answer = ours.recv()
            except (EOFError, OSError):
                child.wait()
                if names:
                    return too_early(names[-1], partial(describe_progress, job.config))
                return Died(f"the process of the run {child.ended()}")
            child.wait()
    return answer


def main(fd: int, parent: int) -> None:
    die_with_parent(parent)
    with Connection(fd) as connection:
        job, policy = connection.recv()
        connection.send(outcome(job, policy))


def outcome(job: RunJob, policy: RestartPolicy) -> Any:
    try:
        with RunResources() as resources:
            return Supervisor(job, resources, policy=policy).run_checked(fresh=False)
    except Unusable as unusable:
        return unusable.policy
    except Exception as error:
        if not isinstance(error, RunError):
            error.add_note(traceback.format_exc())
        return error


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    flush_output()
    os._exit(0)  # a call of the learner may not return
