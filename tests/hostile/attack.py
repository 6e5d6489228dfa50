"""Attacks a pool from the inside and prints as JSON what came of it. Run as a script, as any user.

`python attack.py break_outs enclosed|refused`, `python attack.py random SEED NUM` or
`python attack.py outlive`.
"""

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import programs

from pentad.rewards import confine
from pentad.rewards.confine import LIBC, check
from pentad.rewards.sandbox import JobFailed, Sandbox
from pentad.rewards.section import RewardConfig
from pentad.runtime import process

RUN, CALL = (f"pentad.rewards.calls:{name}" for name in ("print_output", "call"))
REFUSE = "import pentad.rewards.enclosure as e; e.LIBC = type('Refusing', (), "
REFUSE += "{'unshare': lambda *a: -1, '__getattr__': lambda s, n: getattr(l, n)})(); "
COLUMN, _ = confine.ARCHITECTURES[os.uname().machine]
NUMBERS = confine.numbers(confine.REACH_OUT + confine.ARGUED, COLUMN)
CONTENT = "the file of somebody else"


class Victim:
    """A process, a file, sockets and a memory segment of this user, which no job may touch."""

    def __init__(self, folder: str) -> None:
        self.file = Path(folder, "precious")
        self.file.write_text(CONTENT)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(f"\0pentad-{self.port}")
        self.unix.listen()
        self.datagrams = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        for open_to, name in zip(
            self.datagrams, (f"\0pentad-datagrams-{self.port}", f"{folder}/socket"), strict=True
        ):
            open_to.bind(name)
            open_to.setblocking(False)
        self.segment = check(LIBC.shmget(0, 4096, 0o1600))
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        self.process = subprocess.Popen(command, start_new_session=True)
        self.library = Path(os.__file__).stat()
        self.before = self.state()

    def state(self) -> dict[str, object]:
        pid = self.process.pid
        kinds = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
        return {
            "ended": self.process.poll(),
            "limits": [resource.prlimit(pid, kind) for kind in kinds],
            "priority": os.getpriority(os.PRIO_PROCESS, pid),
            "cores": sorted(os.sched_getaffinity(pid)),
            "scheduler": os.sched_getscheduler(pid),
            "file": self.file.read_text(),
            "names": sorted(path.name for path in self.file.parent.iterdir()),
            "library": Path(os.__file__).stat().st_size,
        }

    def harm(self) -> str:
        """What is not as it was."""
        with contextlib.suppress(ProcessLookupError):
            now = self.state()
            return str({k: v for k, v in now.items() if v != self.before[k]} or "")
        return f"it ended: {self.process.poll()}"

    def program(self, source: str) -> str:
        given = f"VICTIM, FILE, PORT = {self.process.pid}, {str(self.file)!r}, {self.port}\n"
        given += f"SEGMENT = {self.segment}\n"
        return f"{given}NUMBERS = {NUMBERS}\n{source}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        LIBC.shmctl(self.segment, 0, None)


async def run(pool: Sandbox, source: str, timeout_s: float) -> object:
    return await pool.run(RUN, {"source": source, "stdin": ""}, timeout_s, capture="stdout")


async def is_whole(pool: Sandbox) -> bool:
    return await run(pool, "print(open('x', 'w').write('abc'), input())", 30.0) == ""


async def break_outs(pool: Sandbox, victim: Victim) -> dict[str, str]:
    """Each by name: what was reached or harmed, or nothing."""
    found = {}
    for name, source in programs.BREAK_OUTS.items():
        if name in programs.TOO_MUCH and pool.reward.allow_weaker:
            continue
        ended = await run(
            pool, victim.program(f"{programs.HEAD}\n{source}\nprint('GOT {name}')"), 20.0
        )
        got = "" if isinstance(ended, JobFailed) and ended.kind != "lost" else f"{ended}"
        if name.startswith("signal"):
            time.sleep(0.01)
        found[name] = got + victim.harm()
    return found


async def fuzz(pool: Sandbox, victim: Victim, seed: int, num: int) -> dict[str, str]:
    """Random programs and random results; the pool answers each, and good ones in between."""
    rng, found = random.Random(seed), {}
    workers = [worker.process.pid for worker in pool.workers if worker.process]
    for i in range(num):
        started = time.monotonic()
        if rng.random() < 0.7:
            source = programs.random_program(rng)
            ended = await run(pool, victim.program(source), 0.3)
        else:
            source = programs.CALLABLE.replace("{value}", rng.choice(programs.VALUES))
            given = {"source": source, "function": "f", "arguments": []}
            ended = await pool.run(CALL, given, 5.0)
        bad = victim.harm()
        if isinstance(ended, JobFailed) and ended.kind == "lost":
            bad += f" lost: {ended.detail}"
        if isinstance(ended, JobFailed) and not str(ended).isprintable():
            bad += f" raw text: {ended!r}"
        if time.monotonic() - started > 20:
            bad += " took too long"
        if i % 10 == 0:
            good = await run(pool, "print(6 * 7)", 30.0)
            bad += "" if str(good).strip() == "42" else f" the next job: {good}"
        if bad:
            found[source] = bad
    now = [worker.process.pid for worker in pool.workers if worker.process]
    if now != workers:
        found["workers"] = f"{workers} became {now}"
    return found


async def outlive(pool: Sandbox, victim: Victim) -> dict[str, str]:
    """A job that will not end by itself, and asks not to end with its parent; we never return."""
    source = f"{programs.HEAD}\nlibc.prctl(1, 0)\n{programs.STUBBORN}"
    print(json.dumps([pool.workers[0].process.pid, pool.folder, str(victim.file)]), flush=True)
    await run(pool, source, 600.0)
    return {}


async def main() -> None:
    kind, *rest = sys.argv[1:]
    if rest == ["refused"]:
        process.BOOT += "import pentad.rewards.confine as c; l = c.LIBC; " + REFUSE
    reward = RewardConfig(memory_mb=512, num_workers=1, allow_weaker=rest == ["refused"])
    pool = Sandbox(reward, [RUN, CALL], isolate=True)
    with tempfile.TemporaryDirectory() as folder:
        victim = Victim(folder)
        try:
            await pool.start()
            if kind == "break_outs":
                found = await break_outs(pool, victim)
            elif kind == "random":
                found = await fuzz(pool, victim, int(rest[0]), int(rest[1]))
            else:
                found = await outlive(pool, victim)
        finally:
            victim.end()
            await pool.close()
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main())
