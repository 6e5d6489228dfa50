"""One run with real processes under fault injection: start, watch, fault, restart."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

from pentad.core.faults import VARIABLE, InjectedFault
from pentad.core.specs import load
from pentad.runtime.local_roles import OF_A_RANK
from pentad.runtime.standby import ENVIRONMENT, IMPORTED_LATE, overwrite
from pentad.telemetry.steps import read_lines
from pentad_tools.chaos.spares import make_spares
from pentad_tools.chaos.workloads import Workload

MARK = "PENTAD_CHAOS"
"""Environment variable that identifies all processes of a trial."""
LIMIT_S = 900.0
"""Time limit of every wait in seconds; nothing else depends on time."""
POLL_S = 0.02
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("pentad.trainer.sources.rollouts", "pentad.trainer.sources.examples"),
        *("pentad.samplers.remote", "pentad.runtime.rank_host", *IMPORTED_LATE),
    ]
)
"""Modules that are imported before runs and ranks are forked: otherwise imports dominate short
runs."""
SHARED = re.compile(r"/dev/shm/pentad-[^/]+|.*(?=/owner\.lock$)")
"""Folders that the run removes at its end, in names of open files."""
Restart = Literal["ranks", "samplers", "samplers, perhaps"]
"""Components that a fault restarts within a run; perhaps: the run may end earlier."""
GROUPS = 4
"""Number of spare groups of ranks, each for one loss; further ones are started."""


class Broken(Exception):
    """A violated invariant, with a message."""


def require(condition: object, sentence: str) -> None:
    if not condition:
        raise Broken(sentence)


@dataclass(slots=True)
class ChaosRun:
    workload: Workload
    folder: Path
    name: str
    draw: random.Random
    """Random choices of ranks and steps, from the seed."""
    done: str = ""
    """Description of the injected fault."""
    process: ForkServerProcess | None = None
    num_faults: int = 0
    struck_at: float | None = None
    """Time of the (last) fault, by the monotonic clock."""
    recovery_s: float | None = None
    """Seconds from the fault to the end of the next step."""
    num_lines: int = 0
    handles: list[tuple[int, int]] = field(default_factory=list)
    """(start, open files) of the scheduler, at the end of each step."""
    num_starts: int = 0
    shared: set[Path] = field(default_factory=set)
    """Temporary folders of the scheduler (samples, weights, rendezvous of ranks). A killed
    scheduler leaves them, and the next start removes them."""
    restarts: frozenset[Restart] = frozenset()
    """Components that the scenario restarts within a start of the run."""
    processes: set[tuple[int, str, int]] = field(default_factory=set)
    """(start, role process such as rollout-0, pid), as found at the end of each step."""

    # Outputs of the run

    @property
    def records(self) -> Path:
        return self.folder / "logs" / "me" / "default" / self.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints" / "me" / "default" / self.name

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def said(self) -> str:
        """Terminal output and log, over all starts."""
        files = [file for file in (self.log, self.records / "log.txt") if file.exists()]
        return "\n".join(file.read_text(errors="replace") for file in files)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.records / "steps.jsonl")

    # Choices by the seed

    def some_rank(self, *, but: int | None = None) -> int:
        ranks = [rank for rank in range(self.workload.world) if rank != but]
        return self.draw.choice(ranks)

    def some_step(self) -> int:
        """A random step except the first, before which no checkpoint exists, and the last."""
        return self.draw.randint(2, self.workload.steps - 1)

    def fault(self, at: str, do: str, **more: Any) -> InjectedFault:
        self.num_faults += 1
        return InjectedFault(at, do, self.folder / f"{self.name}.fault{self.num_faults}", **more)

    # Start and stop

    def start(self, *faults: InjectedFault, words: Sequence[str] = ()) -> None:
        require(self.process is None, "the scenario starts a run while one runs")
        self.process = self.start_beside(*faults, words=words)
        self.num_starts += 1

    def start_until(self, *faults: InjectedFault, words: Sequence[str] = ()) -> None:
        """Starts the run and waits until these faults have been injected."""
        self.start(*faults, words=words)
        for fault in faults:
            self.wait_fault(fault)

    def start_beside(self, *faults: InjectedFault, words: Sequence[str] = ()) -> ForkServerProcess:
        """Starts the same command in a separate process session."""
        given = [
            *(self.workload.command, *self.workload.words),
            *(f"fileroot={self.folder}", "user=me", "experiment_name=default"),
            *(f"trial_name={self.name}", "recover.freq_steps=1", "saver.mode=sync", *words),
        ]
        environment = {k: v for k, v in os.environ.items() if k not in (VARIABLE, *OF_A_RANK)}
        environment |= {MARK: str(self.folder / self.name)}
        if faults:
            environment[VARIABLE] = ";".join(map(str, faults))
        load = self.workload
        is_alone = load.world == 1 and load.command != "train"
        num_spares = 0 if is_alone else GROUPS * (load.world + 1)
        process = CONTEXT.Process(
            target=run_command, args=(given, environment, str(self.log), num_spares)
        )
        process.start()
        return process

    @property
    def pid(self) -> int:
        assert self.process is not None and self.process.pid is not None, "it was started"
        return self.process.pid

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Waits for a condition; raises with a message if the run ends first."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            self.look()
            assert self.process is not None
            if self.process.exitcode is not None and not condition():
                raise Broken(f"the run ended before {what}: {self.last_words}")
            require(time.monotonic() < deadline, f"{LIMIT_S:g} s without {what}")
            time.sleep(POLL_S)

    @property
    def last_words(self) -> str:
        return " | ".join(self.said.strip().splitlines()[-3:])[-500:]

    def wait_fault(self, fault: InjectedFault, number: int = 0) -> dict[str, Any]:
        note = Path(f"{fault.note}.{number}")
        self.wait(note.exists, f"the fault at {fault.at}")
        noted: dict[str, Any] = json.loads(note.read_text())
        self.struck_at, self.recovery_s = noted["monotonic"], None
        return noted

    def release(self, fault: InjectedFault) -> None:
        Path(f"{fault.note}.go").touch()

    def wait_steps(self, number: int) -> None:
        self.wait(lambda: len(self.lines) >= number, f"step {number}")

    def wait_end(self, code: int = 0) -> None:
        process, self.process = self.process, None
        assert process is not None, "it was started"
        deadline = time.monotonic() + LIMIT_S
        while process.exitcode is None:
            self.process = process
            self.look()
            self.process = None
            require(time.monotonic() < deadline, f"the run resumes after {LIMIT_S:g} s")
            time.sleep(POLL_S)
        self.count_lines()
        found = process.exitcode
        require(found == code, f"exit status {found}, not {code}: {self.last_words}")

    def kill_run(self) -> None:
        """Kills the scheduler with SIGKILL; its child processes have to end by themselves."""
        assert self.process is not None
        self.look()
        self.process.kill()
        self.process.join()
        self.struck_at, self.process = time.monotonic(), None
        self.wait_gone()

    def wait_gone(self) -> None:
        deadline = time.monotonic() + LIMIT_S / 10
        while left := processes_of(str(self.folder / self.name)):
            require(time.monotonic() < deadline, f"processes that are left: {left}")
            time.sleep(POLL_S)

    def kill(self, pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
        require(pids, "there is no such process")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        self.struck_at, self.recovery_s = time.monotonic(), None

    def roles(self, role: str) -> list[int]:
        """Indices of the role's processes, such as learner or rollout."""
        found = self.role_processes()
        numbers = sorted(number for name, number in found if name == role)
        return [found[role, number] for number in numbers]

    def role_processes(self) -> dict[tuple[str, int], int]:
        """The pid of each role process, by role and number."""
        found = {}
        for pid, line in processes_of(str(self.folder / self.name)).items():
            if known := re.search(r"role_host (\w+)-(\d+)\b", line):
                found[known[1], int(known[2])] = pid
        return found

    def close(self) -> None:
        """Removes all processes and files of the run, however the scenario ended."""
        for pid in processes_of(str(self.folder / self.name)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.kill()
            self.process.join()

    # Monitoring

    def look(self) -> None:
        assert self.process is not None
        found = open_files(self.pid)
        self.shared |= {Path(one[0]) for name in found if (one := SHARED.match(name))}
        if self.count_lines() and found:
            self.handles.append((self.num_starts, len(found)))
            for (role, number), pid in self.role_processes().items():
                self.processes.add((self.num_starts, f"{role}-{number}", pid))

    def count_lines(self) -> bool:
        """Whether a step was recorded since the last call."""
        path = self.records / "steps.jsonl"
        number = path.read_bytes().count(b"\n") if path.exists() else 0
        is_new, self.num_lines = number > self.num_lines, number
        if is_new and self.struck_at is not None and self.recovery_s is None:
            self.recovery_s = time.monotonic() - self.struck_at
        return is_new


def run_command(words: list[str], environment: dict[str, str], log: str, num_spares: int) -> None:
    """Child process: runs the command line with its output in a file."""
    os.setsid()  # signals to its group reach no other process
    os.environ.clear()
    os.environ.update(environment)
    overwrite(ENVIRONMENT, f"{MARK}={environment[MARK]}".encode())  # for `processes_of`
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    sys.argv[:] = ["pentad", *words]
    make_spares(num_spares)
    load("pentad.cli.main:main")()


def open_files(pid: int) -> list[str]:
    """Names of the files that a process has open; empty if it has ended."""
    found = []
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed in the meantime
                found.append(str(link.readlink()))
    return found


def processes_of(mark: str) -> dict[int, str]:
    """The live processes of a trial and their command lines."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            if (folder / "stat").read_text().rpartition(") ")[2].split()[0] != "Z":
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = line.decode(errors="replace").strip()
    return found
