"""Continues a one-process run in a fresh process after a failure that left this one unusable: a
CUDA error, or a call that does not return.

This process forwards signals and waits. The fresh process receives the job and the restart count so
far, and returns the summary of the run or raises its error.
"""

from __future__ import annotations

import signal
import threading
import traceback
from functools import partial
from types import FrameType

from pentad.core.device import reset_gpus
from pentad.core.errors import RunError
from pentad.runtime.helper import Channel, Died, Helper
from pentad.runtime.restarts import RestartPolicy
from pentad.runtime.signals import handling_signals
from pentad.trainer.context import RunSummary
from pentad.trainer.processes.resources import RunResources
from pentad.trainer.processes.supervisor import RunJob, Supervisor, Unusable
from pentad.trainer.run_folders import describe_progress
from pentad.trainer.stopping import too_early

RESET_S = 15.0
"""Time limit for the GPUs to free the memory of this process, in seconds."""


def run_in_fresh_processes(job: RunJob, policy: RestartPolicy) -> RunSummary:
    """Continues the run in a fresh process; starts another one whenever a process becomes
    unusable."""
    check_gpus_free()
    while True:
        try:
            answer = ask_fresh_process(job, policy)
        except Died as error:
            if not policy.restarts_after(str(error)):
                raise
            continue
        if isinstance(answer, RunSummary):
            return answer
        policy = answer


def check_gpus_free() -> None:
    """Raises if a kernel that never ends keeps this process's GPU memory."""
    resetting = threading.Thread(target=reset_gpus, daemon=True)
    resetting.start()
    resetting.join(RESET_S)
    if resetting.is_alive():
        rule = "the GPU does not free the memory of a kernel that never ends"
        raise RunError(f"{rule}; start the command again, and the run resumes from its checkpoint")


def ask_fresh_process(job: RunJob, policy: RestartPolicy) -> RunSummary | RestartPolicy:
    """Returns the summary, or the restart policy if that process became unusable too."""
    names: list[str] = []
    helper = Helper("the process of the run", f"{__name__}:serve")

    def pass_on(number: int, frame: FrameType | None) -> None:
        names.append(signal.Signals(number).name)
        helper.child.send(number)

    with handling_signals(pass_on):
        answer = helper.call(job, policy)
        error = answer.exception()
        helper.wait()
    if isinstance(error, Died) and names:
        raise too_early(names[-1], partial(describe_progress, job.config)) from error
    found: RunSummary | RestartPolicy = answer.result()
    return found


def serve(channel: Channel) -> None:
    """Runs in the fresh process: makes the call on the main thread, which receives the signals."""
    number, job, policy = channel.receive()
    channel.answer(number, outcome, job, policy)


def outcome(job: RunJob, policy: RestartPolicy) -> RunSummary | RestartPolicy:
    try:
        with RunResources() as resources:
            return Supervisor(job, resources, policy=policy).run_checked(fresh=False)
    except Unusable as unusable:
        return unusable.policy
    except Exception as error:
        if not isinstance(error, RunError):
            error.add_note(traceback.format_exc())
        raise
