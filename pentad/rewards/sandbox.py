"""A pool of killable worker processes with time limits for all jobs.

A worker (`warden.py`) runs each job in a child process under the limits of `confine.py`. A job that
loops, crashes, forks, floods or exits gives JobFailed; the worker continues. A lost worker is
killed with all processes below it and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import pickle
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pentad.core.errors import (
    InfraFailure,
    Problem,
    RunError,
    UserError,
    one_line,
    raise_problems,
)
from pentad.core.scratch import scratch_folder
from pentad.core.specs import shown
from pentad.rewards import breakout, confine, warden
from pentad.rewards.section import RewardConfig
from pentad.runtime.process import Child, python_command
from pentad.runtime.wire import Connection

log = logging.getLogger(__name__)
FailureKind = Literal[
    "timeout", "memory", "output", "processes", "crash", "error", "cancelled", "lost", "judge"
]
Cause = Literal["ours", "sample", "unclear"]
MAX_DETAIL = 500
MAX_NESTING = 50
"""Maximum depth of lists and dicts in a result, because its readers may recurse."""
GRACE_S = 10.0
"""Seconds beyond the worker's own time limit after which the pool abandons a job."""
START_TIMEOUT_S = 60.0
"""Time limit for starting a worker, including the import of the reward's module, in seconds."""
CLOSE_PATIENCE_S = 2.0
MIB = 1 << 20
FOLDER_PREFIX = "pentad-jobs-"


def limits_of(reward: RewardConfig, *, isolate: bool = False) -> confine.Limits:
    """Returns the limits of a job. `isolate`: whether it is a program of the model."""
    if isolate and reward.allow_processes:
        rule = "isolated programs cannot start processes"
        raise UserError(Problem("reward.allow_processes = true", rule, "leave it out"))
    return confine.Limits(
        isolate=isolate,
        allow_processes=reward.allow_processes,
        max_memory_bytes=reward.memory_mb * MIB,
        allow_weaker=reward.allow_weaker,
    )


@dataclass(frozen=True, slots=True)
class JobFailed:
    """A job without a result."""

    kind: FailureKind
    """Kind of failure; lost: of the pool; others: of the job."""
    detail: str
    """Description of the failure, one printable line."""
    cause: Cause = "ours"
    """Cause of the failure as far as known, see `RewardFunction.judge`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", one_line(self.detail, MAX_DETAIL))

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class WorkerLost(Exception):
    """A worker did not start, died, or sent an invalid answer."""


@dataclass(eq=False)
class Worker:
    """The parent's end of one warden process. One job at a time."""

    limits: confine.Limits
    preload: Sequence[str]
    folder: str
    start_timeout_s: float = START_TIMEOUT_S
    process: Child | None = None
    connection: Connection | None = None
    lost_at: float | None = None
    """Time at which it stopped answering."""

    async def start(self) -> dict[str, Any]:
        """Starts the warden; returns its imports and the working protections."""
        limits = dataclasses.asdict(self.limits)
        config = {"limits": limits, "folder": self.folder, "preload": list(self.preload)}
        environment = _environment(isolate=self.limits.isolate)
        command = python_command(warden.__name__, config)
        self.process, ours = Child.connected(command, environment=environment)
        streams = await asyncio.open_unix_connection(sock=ours)
        self.connection = Connection("the reward worker", *streams, generation=0)
        with breakout.bait(self.folder) as bait:
            _, body = await self._ask(self.start_timeout_s, "hello", bait=bait)
        return dict(json.loads(body))

    async def run(self, job: dict[str, Any], payload: bytes) -> tuple[JobFailed | None, bytes]:
        if self.process is None:
            check_start(await self.start(), self.limits)
        return await self._ask(job["timeout_s"] + GRACE_S, "run", job=job, body=payload)

    def cancel(self) -> None:
        """Makes the warden end its job at once; the caller of the job receives the answer."""
        if self.connection is not None:
            self.connection.emit("cancel", None)

    async def end(self, patience_s: float = CLOSE_PATIENCE_S) -> None:
        """Ends the warden and all processes below it; kills them after `patience_s`."""
        process, self.process = self.process, None
        connection, self.connection = self.connection, None
        if connection is not None:
            await connection.close()
        if process is None:
            return
        if not await asyncio.to_thread(process.wait, patience_s):
            await asyncio.to_thread(confine.end_all, process.pid, with_root=True)
        await asyncio.to_thread(process.end)

    async def _ask(
        self, timeout_s: float, method: str, **arguments: Any
    ) -> tuple[JobFailed | None, bytes]:
        assert self.connection is not None, "it has started"
        try:
            async with asyncio.timeout(timeout_s):
                said = await self.connection.call(method, **arguments)
        except TimeoutError as failure:
            raise WorkerLost(f"no answer within {timeout_s:g} s") from failure
        except (InfraFailure, RunError) as failure:
            raise WorkerLost(f"it ended or sent invalid data ({failure})") from failure
        failed = JobFailed(said["failure"], said["detail"]) if said["failure"] else None
        return failed, said["body"]


def check_start(said: dict[str, Any], limits: confine.Limits) -> None:
    """Raises UserError if a worker's first message shows that jobs cannot run safely."""
    problems = [
        Problem(
            f"reward.fn = {shown(spec)}",
            f"it cannot be imported ({one_line(error, MAX_DETAIL)})",
            "correct it, and try it alone with: pentad reward RECIPE",
        )
        for spec, error in said["errors"].items()
    ]
    limit, used = limits.max_memory_bytes, said["address_space_bytes"]
    if used > limit:
        rule = f"a worker takes {used >> 20} MiB before its first job"
        remedy = f"give at least {(2 * used) >> 20}"
        problems.append(Problem(f"reward.memory_mb = {limit >> 20}", rule, remedy))
    weak = not breakout.AMOUNTS.issuperset(said["missing"])
    if weak and not limits.allow_weaker and not problems:
        remedy = "see docs/security.md, or accept it with reward.allow_weaker = true"
        problems.append(Problem("reward pool", lacking(said), remedy))
    raise_problems(problems)


def check_platform() -> None:
    if sys.platform != "linux":
        rule = "the reward pool needs Linux"
        raise UserError(Problem(f"platform = {sys.platform}", rule, "use a built-in reward"))


async def what_is_missing() -> str:
    """Describes the protections of isolated programs that this machine lacks; empty if none."""
    check_platform()
    with scratch_folder(FOLDER_PREFIX) as folder:
        worker = Worker(confine.Limits(isolate=True), (), str(folder))
        try:
            said = await worker.start()
        finally:
            await worker.end()
    return lacking(said) if said["missing"] else ""


def lacking(said: dict[str, Any]) -> str:
    """Describes the protections that this machine lacks, with the consequence and the reason."""
    names = [str(name) for name in said["missing"]]
    abilities = ", ".join(dict.fromkeys(breakout.MEANING.get(name, name) for name in names))
    refused = f" (namespaces are refused: {said['refused']})" if said["refused"] else ""
    rule = f"this machine does not offer: {', '.join(names)}{refused}; a job can {abilities}"
    return one_line(rule, 2 * MAX_DETAIL)


def _environment(*, isolate: bool) -> dict[str, str]:
    """Environment of a job: one thread, no GPU, and for untrusted programs no secrets."""
    fixed = {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    kept = {name: os.environ[name] for name in confine.WHERE_PYTHON_IS if name in os.environ}
    return {**(kept if isolate else os.environ), "LANG": "C.UTF-8", **threads, **fixed}


class Sandbox:
    """Runs jobs, at most `num_workers` at a time. Belongs to the event loop that started it."""

    def __init__(
        self,
        reward: RewardConfig,
        preload: Sequence[str] = (),
        *,
        isolate: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.reward = reward
        self.limits = limits_of(reward, isolate=isolate)
        self.num_workers = reward.num_workers or max(1, min(8, (os.cpu_count() or 2) // 2))
        self.preload = preload
        self.start_timeout_s = start_timeout_s
        self.folder = ""
        self.cleaning = contextlib.ExitStack()
        self.idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self.workers: list[Worker] = []
        self.chores: set[asyncio.Task[None]] = set()

    async def start(self) -> dict[str, dict[str, Any]]:
        """Starts one worker as a test; the others start when they are needed. Returns
        `core.specs.describe` of each function, from the process that imported it."""
        check_platform()
        self.folder = str(self.cleaning.enter_context(scratch_folder(FOLDER_PREFIX)))
        for _ in range(self.num_workers):
            worker = Worker(self.limits, self.preload, self.folder, self.start_timeout_s)
            self.workers.append(worker)
        first = self.workers[0]
        try:
            said = await first.start()
            check_start(said, self.limits)
            if said["missing"]:
                log.warning("reward pool: %s", lacking(said))
        except WorkerLost as failure:
            await first.end(patience_s=0.0)
            await self.close()
            names = ", ".join(self.preload)
            rule = f"the worker that imports it did not start: {failure}"
            raise UserError(Problem(f"reward.fn = {names}", rule)) from failure
        except UserError:
            await self.close()
            raise
        for worker in reversed(self.workers):
            self.idle.put_nowait(worker)
        return dict(said["described"])

    async def run(
        self,
        spec: str,
        payload: Mapping[str, Any],
        timeout_s: float | None = None,
        *,
        capture: Literal["result", "stdout"] = "result",
    ) -> Any | JobFailed:
        """Calls the function `spec` with the payload as keyword arguments. Returns its result as
        JSON data, or with `capture="stdout"` its output."""
        body = pickled(spec, dict(payload))
        return await self.run_on(await self.idle.get(), spec, body, timeout_s, capture=capture)

    async def run_on(
        self,
        worker: Worker,
        spec: str,
        body: bytes,
        timeout_s: float | None = None,
        *,
        capture: Literal["result", "stdout"] = "result",
    ) -> Any | JobFailed:
        """Like `run`, on a worker that was taken from `idle` and is returned there."""
        timeout_s = timeout_s or self.reward.timeout_s
        job = {"spec": spec, "timeout_s": timeout_s, "capture": capture}
        # A separate task, because a partly read reply must be read to its end.
        task = asyncio.create_task(worker.run(job, body))
        try:
            failed, answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._later(self._abandon(worker, task))
            raise
        except WorkerLost as failure:
            log.warning("a reward worker died and is restarted: %s", failure)
            worker.lost_at = worker.lost_at or time.monotonic()
            self._later(self._replace(worker))
            return JobFailed("lost", str(failure))
        except BaseException:
            self._later(self._replace(worker))
            raise
        self.idle.put_nowait(worker)
        if worker.lost_at is not None:
            away_s, worker.lost_at = time.monotonic() - worker.lost_at, None
            log.warning("a reward worker was replaced %.1f s after it died", away_s)
        if failed is not None:
            return failed
        return answer.decode(errors="replace") if capture == "stdout" else _value_of(answer)

    async def close(self) -> None:
        """Ends all workers and removes their files. Running jobs end with them."""
        await asyncio.gather(*self.chores, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self.workers))
        await asyncio.to_thread(self.cleaning.close)

    def _later(self, chore: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(chore)
        self.chores.add(task)
        task.add_done_callback(self.chores.discard)

    async def _abandon(self, worker: Worker, task: asyncio.Task[Any]) -> None:
        """Ends a job whose caller no longer waits; keeps its worker."""
        try:
            worker.cancel()
            await task
        except (WorkerLost, UserError):
            await worker.end(patience_s=0.0)
        self.idle.put_nowait(worker)

    async def _replace(self, worker: Worker) -> None:
        await worker.end(patience_s=0.0)
        self.idle.put_nowait(worker)


def pickled(fn: str, arguments: dict[str, Any]) -> bytes:
    """Pickles the arguments of a function; UserError if that is not possible."""
    try:
        return pickle.dumps(arguments)
    except Exception as failure:  # objects may raise any exception when pickled
        rule = f"its arguments cannot be sent to another process ({failure})"
        raise UserError(Problem(f"reward.fn = {fn}", rule)) from failure


def _value_of(answer: bytes) -> Any | JobFailed:
    """Parses a job's bytes as JSON, with checks of the untrusted content."""
    try:
        result = json.loads(answer)
        if not isinstance(result, dict):
            return JobFailed("crash", f"its result is a {type(result).__name__}, not a dict")
        if "value" not in result:
            kind: FailureKind = "memory" if result["failure"] == "memory" else "error"
            return JobFailed(kind, str(result["detail"]))
    except (ValueError, KeyError, RecursionError) as failure:
        return JobFailed("crash", f"its result is not JSON ({failure})")
    if _nesting(result["value"]) > MAX_NESTING:
        return JobFailed("error", f"its result is nested deeper than {MAX_NESTING} levels")
    return result["value"]


def _nesting(value: Any) -> int:
    """Nesting depth of lists and dicts; computed level by level, without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return depth
