"""Starts a run on its ranks: this process alone, processes that it starts, or torchrun's ranks.

Every rank has a service (`trainer.rank.service`), which the scheduler calls: over a connection
(`runtime.group_calls`), or directly if the only rank is its own process (`runtime.calls`).
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import FrameType

from pentad.config.rules.elastic import fit_world
from pentad.config.schema import Config
from pentad.config.topology import facts_of
from pentad.core.device import reset_gpus
from pentad.core.errors import Problem, RunError, UserError
from pentad.planner.hub import pins_of
from pentad.runtime.helper import Channel, Died, Helper
from pentad.runtime.launched import LaunchedRuntime, Meeting, shares_store
from pentad.runtime.rank import Rank, is_one_machine, rank_from_environment
from pentad.runtime.rank_host import device_of
from pentad.runtime.restarts import RestartPolicy
from pentad.runtime.signals import handling_signals
from pentad.trainer.context import RunSummary
from pentad.trainer.processes.supervisor import (
    MakeService,
    RunJob,
    Supervisor,
    Unusable,
    launched_spec,
)
from pentad.trainer.run import CheckInputs, lead
from pentad.trainer.run_folders import describe_progress
from pentad.trainer.stopping import too_early


def run_over_ranks(
    check: CheckInputs,
    make_service: MakeService,
    config: Config,
    notes: Sequence[str] = (),
    fresh: bool = False,
    device: str = "auto",
) -> RunSummary:
    """Runs a job on as many ranks as the layout has. `check` raises config problems before any
    process starts. Under torchrun every rank calls this, and only rank 0 returns."""
    own = rank_from_environment()
    if own is not None and config.elastic.enabled:
        config, own, why = fit_torchrun(config, own)
        notes = [*notes, f"elastic: {why}"] if why else notes
    world = config.component("actor").world
    if own is not None and own.world != world:
        remedy = f"start with torchrun --nproc-per-node {world}, or unset RANK and WORLD_SIZE"
        where, rule = f"WORLD_SIZE = {own.world}", f"the layout needs {world} ranks"
        raise UserError(Problem(where, rule, remedy))
    job = RunJob(lead, make_service, check, config, notes, device)
    if own is not None:
        return run_under_torchrun(job, own, fresh=fresh)
    try:
        return Supervisor(job, is_remote=job.is_remote).run_checked(fresh=fresh)
    except Unusable as unusable:
        return run_in_fresh_processes(job, unusable.policy)


def fit_torchrun(config: Config, rank: Rank) -> tuple[Config, Rank, str]:
    """Fits the layout to the ranks of torchrun's agents, which may be fewer than requested; returns
    the changes as text. Ranks that the layout does not use exit here."""
    if shares_store() and not is_one_machine():
        rule = "the agents keep one store over restarts, with the addresses of dead ranks"
        remedy = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all machines (scripts/launch.sh does)"
        raise UserError(Problem("elastic.enabled = true under torchrun", rule, remedy))
    fitted = fit_world(config, rank.world)
    least = config.elastic.min_ranks
    if fitted is None or fitted.world < least:
        rule = (
            f"elastic.min_ranks = {least}, and the layout can use {fitted.world if fitted else 0}"
        )
        remedy = "give torchrun --nnodes MIN:MAX with a larger MIN"
        raise UserError(Problem(f"WORLD_SIZE = {rank.world}", rule, remedy))
    if rank.rank >= fitted.world:
        raise SystemExit(0)
    if fitted.world < rank.world:
        os.environ["WORLD_SIZE"] = str(fitted.world)  # torch reads it when the group is made
        local = int(os.environ.get("LOCAL_WORLD_SIZE", fitted.world))
        os.environ["LOCAL_WORLD_SIZE"] = str(min(local, fitted.world))
        rank.world = fitted.world
    return fitted.config, rank, fitted.why


def run_under_torchrun(job: RunJob, rank: Rank, *, fresh: bool) -> RunSummary:
    """Runs one process of a start by torchrun, which restarts all of them after a failure. That of
    rank 0 is the scheduler; the others serve it and exit."""
    if rank.world == 1:
        return run_once(job, fresh=fresh)
    device_of(rank, job.device)  # raises if its GPU is missing
    shared = Path(job.config.fileroot).expanduser().absolute()
    meeting, pins = Meeting(rank, shared), pins_of(job.config)
    if rank.rank > 0:
        meeting.serve(launched_spec(job, rank), pins)
        raise SystemExit(0)
    is_spread = facts_of(job.config).is_spread or not is_one_machine()
    launched = LaunchedRuntime(meeting, pins, is_spread=is_spread)
    with closing(meeting):
        return run_once(job, launched, fresh=fresh)


def run_once(job: RunJob, launched: LaunchedRuntime | None = None, *, fresh: bool) -> RunSummary:
    """Runs a job without restarts. Its learner, if any, is this process, or `launched` ranks."""
    policy = RestartPolicy(retries=0)
    once = Supervisor(job, launched, is_remote=launched is not None, policy=policy)
    return once.run_checked(fresh=fresh)


RESET_S = 15.0
"""Time limit for the GPUs to free the memory of this process, in seconds."""


def run_in_fresh_processes(job: RunJob, policy: RestartPolicy) -> RunSummary:
    """Continues a one-process run in a fresh process after a failure that left this one unusable: a
    CUDA error, or a call that does not return. Starts another one whenever a process becomes
    unusable. This process forwards signals and waits; a fresh one receives the job and the restart
    count so far, and returns the summary of the run or raises its error."""
    check_gpus_free()
    while True:
        answer = ask_fresh_process(job, policy)
        if isinstance(answer, RunSummary):
            return answer
        if isinstance(answer, RestartPolicy):
            policy = answer
        elif not policy.restarts_after(str(answer)):
            raise answer


def check_gpus_free() -> None:
    """Raises if a kernel that never ends keeps this process's GPU memory."""
    resetting = threading.Thread(target=reset_gpus, daemon=True)
    resetting.start()
    resetting.join(RESET_S)
    if resetting.is_alive():
        rule = "the GPU does not free the memory of a kernel that never ends"
        raise RunError(f"{rule}; start the command again, and the run resumes from its checkpoint")


def ask_fresh_process(job: RunJob, policy: RestartPolicy) -> RunSummary | RestartPolicy | Died:
    """Returns the summary, the restart policy if that process became unusable too, or how it died.
    Raises its errors, also that a helper of its own died."""
    names: list[str] = []
    helper = Helper("the process of the run", f"{__name__}:serve_fresh")

    def pass_on(number: int, frame: FrameType | None) -> None:
        names.append(signal.Signals(number).name)
        helper.child.send(number)

    with handling_signals(pass_on):
        answer = helper.call(job, policy)
        error = answer.exception()
        helper.wait()
    if isinstance(error, Died) and error.pid == helper.child.pid:
        if names:
            raise too_early(names[-1], partial(describe_progress, job.config)) from error
        return error
    found: RunSummary | RestartPolicy = answer.result()
    return found


def serve_fresh(channel: Channel) -> None:
    """Runs in the fresh process: makes the call on the main thread, which receives the signals."""
    number, job, policy = channel.receive()
    channel.answer(number, outcome, job, policy)


def outcome(job: RunJob, policy: RestartPolicy) -> RunSummary | RestartPolicy:
    try:
        return Supervisor(job, policy=policy).run_checked(fresh=False)
    except Unusable as unusable:
        return unusable.policy
    except Exception as error:
        if not isinstance(error, RunError):
            error.add_note(traceback.format_exc())
        raise
