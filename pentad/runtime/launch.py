"""Starts a function on several ranks of this machine, watches them, and ends them together.

    run_ranks("package.module:function", payload, world=8, log_folder=...)

The function is called as function(rank, payload) on every rank, within one process group. Under
torchrun, or any launcher that sets RANK and WORLD_SIZE, nothing is started: this process is a rank
already. On every way out, whatever was started here has ended.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pentad.core.errors import Interrupted, Problem, RunError, UserError
from pentad.runtime.environment import launch_environment
from pentad.runtime.process import RankProcess
from pentad.runtime.rank import Board, Rank, rank_from_environment
from pentad.runtime.report import (
    Failure,
    describe_exit,
    describe_hang,
    explain,
    read_failure,
    tail,
)
from pentad.runtime.scratch import scratch_folder
from pentad.runtime.signals import hearing

HOST = "127.0.0.1"
POLL_S = 0.05
FOLLOW_S, SETTLE_S = 2.0, 0.3
"""After a failure, how long others may take to say what they saw; once a cause is known, less."""
DUMP_S = 1.0
"""How long a stuck rank may take to write down its stack."""
TERMINATE_S = 2.0
"""Between asking a rank to end and ending it."""
START_S = 30.0
"""How long a rank may take until it is first seen to run, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """How a group is started and watched."""

    device: str = "auto"
    """auto: a GPU for each rank where there are GPUs."""
    deterministic: bool = False
    """Sets the environment that bitwise repeatable runs need."""
    timeout_s: float = 600.0
    """Longest wait in a collective, and for the group to come together."""
    stall_s: float | None = None
    """A group is ended if for this long one of its processes is not seen to run, or no rank reports
    a step. None: never.
    Until the first step nothing may move for `timeout_s`, if that is longer."""
    stop_s: float = 120.0
    """How long ranks may take to leave after a signal, which is passed on to them; a second one
    ends them at once."""
    has_group: bool = True
    """Whether ranks join a process group (and import torch) before the function is called."""


def run_ranks(
    target: str,
    payload: Any,
    *,
    world: int,
    log_folder: Path,
    settings: LaunchSettings | None = None,
) -> list[Any]:
    """What the function returned on each rank, or under torchrun on this one.

    `payload` and results are what JSON can hold. Output of rank 0 is shown; that of every rank is
    in `log_folder`. Raises the first cause of a failure: UserError as it was, or RunError with
    rank, step and last words.
    """
    settings = settings or LaunchSettings()
    own = rank_from_environment()
    if own is not None:
        return [_run_here(own, target, payload, world, settings)]
    log_folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder("pentad-ranks-") as folder:
        group = LaunchedRanks(folder, log_folder, world, settings)
        try:
            # Noted, and passed on by `watch`.
            with hearing(lambda number, frame: group.signals.append(number)):
                group.start(target, payload)
                return group.watch()
        finally:
            group.end()


def _run_here(rank: Rank, target: str, payload: Any, world: int, settings: LaunchSettings) -> Any:
    if rank.world != world:
        rule = f"the layout needs {world} ranks"
        remedy = f"start with torchrun --nproc-per-node {world}, or unset RANK and WORLD_SIZE"
        raise UserError(Problem(f"WORLD_SIZE = {rank.world}", rule, remedy))
    from pentad.runtime.worker import call, load_target

    job = {
        "device": settings.device,
        "timeout_s": settings.timeout_s,
        "has_group": settings.has_group,
    }
    try:
        return call(load_target(target), rank, payload, job)
    except RunError as error:
        raise RunError(f"{rank}: {error}") from error


class LaunchedRanks:
    """The processes of one group, from their start to their end."""

    def __init__(
        self, folder: Path, log_folder: Path, world: int, settings: LaunchSettings
    ) -> None:
        self.folder = folder
        self.log_folder = log_folder
        self.world = world
        self.settings = settings
        self.board = Board.make(folder / "board", world)
        self.made_at = time.monotonic()
        """Until a rank is seen to run its beat is the making of the board."""
        self.processes: list[RankProcess] = []
        self.copier: threading.Thread | None = None
        self.signals: list[int] = []

    def log(self, rank: int) -> Path:
        return self.log_folder / f"rank-{rank}.log"

    # Starting

    def start(self, target: str, payload: Any) -> None:
        with socket.socket() as listener:
            listener.bind((HOST, 0))  # the kernel picks the port, and keeps it for rank 0
            listener.listen(self.world)
            job = {
                "target": target,
                "payload": payload,
                "log_folder": str(self.log_folder.absolute()),
                "parent": os.getpid(),
                "path": [entry for entry in sys.path if entry],
                "group": secrets.token_hex(8),
                "listen_fd": listener.fileno(),
                "device": self.settings.device,
                "timeout_s": self.settings.timeout_s,
                "has_group": self.settings.has_group,
            }
            file = self.folder / "job.json"
            file.write_text(json.dumps(job), encoding="utf-8")
            for rank in range(self.world):
                self._spawn(rank, file, listener)

    def _spawn(self, rank: int, job: Path, listener: socket.socket) -> None:
        environment = launch_environment(
            os.environ,
            rank=rank,
            world=self.world,
            host=HOST,
            port=listener.getsockname()[1],
            deterministic=self.settings.deterministic,
        )
        self.log(rank).write_bytes(b"")
        with self.log(rank).open("ab") as log:  # its stacks are appended too
            # Rank 0 draws on our own terminal; what it complains about is shown and kept.
            is_first = rank == 0
            popen = subprocess.Popen(
                [sys.executable, "-m", "pentad.runtime.worker", str(job)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if is_first else log,
                stderr=subprocess.PIPE if is_first else subprocess.STDOUT,
                pass_fds=[listener.fileno()] if is_first else [],
                start_new_session=True,  # so that its own children can be ended with it
            )
        self.processes.append(RankProcess(popen))
        if is_first:
            assert popen.stderr is not None
            self.copier = threading.Thread(
                target=_copy, args=(popen.stderr, self.log(rank)), daemon=True
            )
            self.copier.start()

    # Watching

    def watch(self) -> list[Any]:
        """Results of all ranks; raises as soon as one fails, hangs, or we are told to stop."""
        while True:
            if self.signals:
                return self._stop(self.signals[0])
            codes = [process.code for process in self.processes]
            if any(code not in (None, 0) for code in codes):
                raise self._explain(self._gather())
            if all(code == 0 for code in codes):
                return [self._result(rank) for rank in range(self.world)]
            if hung := self._find_hang(self.settings.stall_s):
                raise self._explain(self._stuck(*hung))
            time.sleep(POLL_S)

    def _result(self, rank: int) -> Any:
        file = self.folder / f"result-{rank}.json"
        if not file.exists():
            raise RunError(f"rank {rank} of {self.world} ended without a result")
        return json.loads(file.read_text(encoding="utf-8"))

    def _find_hang(self, silence_s: float | None) -> tuple[str, list[int]] | None:
        """How it shows that ranks hang, and which; None if none does. `silence_s` is how long a
        process may not be seen to run."""
        now, limit = time.monotonic(), self.settings.stall_s
        seen = [self.board.read(rank) for rank in range(self.world)]
        running = [rank for rank in range(self.world) if self.processes[rank].is_running]
        if silence_s is not None:
            silent = []
            for rank in running:
                has_run = seen[rank].beat_at > self.made_at
                allowed = silence_s if has_run else max(silence_s, START_S)
                if now - seen[rank].beat_at > allowed:
                    silent.append(rank)
            if silent:
                return "does not run", silent
        if limit is None:
            return None
        if all(one.step is None for one in seen):  # a model is read, a group comes together
            limit = max(limit, self.settings.timeout_s)
        is_still = now - max(one.step_at for one in seen) > limit
        return ("reported no step", running) if is_still else None

    def _gather(self) -> list[Failure]:
        """All failures, after those that belong to the first had time to show."""
        self._wait(SETTLE_S)
        failures = self._failures()
        if all(failure.is_consequence for failure in failures):
            self._wait(FOLLOW_S)
            failures = self._failures()
        if all(failure.is_consequence for failure in failures):
            # They waited for somebody: those who are still silent.
            silent = [r for r, process in enumerate(self.processes) if process.is_running]
            failures += self._stuck("did not answer the others", silent)
        return failures

    def _failures(self) -> list[Failure]:
        return [found for rank in range(self.world) if (found := self._failure(rank))]

    def _failure(self, rank: int) -> Failure | None:
        """Why a rank failed; None for one that did not, or has not ended."""
        code = self.processes[rank].code
        if code is None or code == 0:
            return None
        reported = read_failure(self.folder / f"failure-{rank}.json")
        if reported is not None:
            return reported
        entry = self.board.read(rank)
        if rank == 0 and self.copier is not None:
            self.copier.join(DUMP_S)  # its last words may still be in the pipe
        lines, at = tail(self.log(rank)), entry.step_at
        return Failure(rank, entry.step, "died", describe_exit(code), at, lines=lines)

    def _stuck(self, verb: str, ranks: list[int]) -> list[Failure]:
        """What the given ranks are doing; of those, the ones that lag behind come first. All write
        down their stacks, since it shows there who waits for whom."""
        for process in self.processes:
            process.send(signal.SIGUSR1)
        time.sleep(DUMP_S)
        found = []
        for rank in ranks:
            entry = self.board.read(rank)
            waited = time.monotonic() - entry.step_at
            is_stopped = self.processes[rank].is_stopped
            message = describe_hang(verb, entry.step, waited, is_stopped=is_stopped)
            order = -1.0 if entry.step is None else float(entry.step)
            lines = tail(self.log(rank))
            found.append(Failure(rank, entry.step, "stuck", message, order, lines=lines))
        return found

    def _explain(self, failures: list[Failure]) -> Exception:
        logs = [self.log(rank) for rank in range(self.world)]
        return explain(failures, self.world, logs)

    # Ending

    def _stop(self, number: int) -> list[Any]:
        """Passes a signal on and lets the ranks leave in their own way. What they return or say
        then counts; if they say nothing, the program ends as the signal asks."""
        for process in self.processes:
            process.send(number)
        deadline = time.monotonic() + self.settings.stop_s
        while time.monotonic() < deadline and len(self.signals) < 2:
            if not any(process.is_running for process in self.processes):
                break
            time.sleep(POLL_S)
        if all(process.code == 0 for process in self.processes):
            return [self._result(rank) for rank in range(self.world)]
        failures = self._failures()
        if any(f.kind in ("user", "run", "bug") and not f.is_consequence for f in failures):
            error = self._explain(failures)
            is_asked = number == signal.SIGINT and isinstance(error, RunError)
            raise Interrupted(str(error)) if is_asked else error
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def end(self) -> None:
        """No process of the group, nor any child of it, is left."""
        for process in self.processes:
            process.send(signal.SIGTERM)
        self._wait(TERMINATE_S)
        for process in self.processes:
            process.end()
        if self.copier is not None:
            self.copier.join(DUMP_S)

    def _wait(self, seconds: float) -> None:
        """Until all have ended, or so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(p.is_running for p in self.processes):
            time.sleep(POLL_S)


def _copy(source: IO[bytes], path: Path) -> None:
    """What rank 0 complains about, to our own stderr and to its log."""
    with path.open("ab") as log:
        for line in source:
            log.write(line)
            log.flush()
            with suppress(OSError, ValueError):  # nobody may be looking
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()
