"""The pool: hostile jobs end in time, the next job finds it whole, and nothing is left behind."""

import ast
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from pentad.core import scratch
from pentad.core.errors import UserError
from pentad.rewards.sandbox import JobFailed, Sandbox
from pentad.rewards.section import RewardConfig
from pentad.runtime import process

FILE = Path(__file__).with_name("hostile.py")
sys.path.append(str(FILE.parent))
from hostile import KINDS  # noqa: E402


def spec(name: str) -> str:
    return name if ":" in name else f"{FILE}:{name}"


def pool_of(preload=(), **changes) -> Sandbox:
    keys = {"num_workers": 2, "timeout_s": 20.0, "memory_mb": 512} | changes
    beside = {name: keys.pop(name) for name in ("isolate", "start_timeout_s") if name in keys}
    return Sandbox(RewardConfig(**keys), preload, **beside)


def with_pool(use, preload=("fine",), **changes):
    """Runs `use(pool)`; afterwards no process and no file of the pool may be left."""

    async def run():
        pool = pool_of([spec(name) for name in preload], **changes)
        await pool.start()
        try:
            return await use(pool)
        finally:
            await pool.close()
            assert not Path(pool.folder).exists()

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    result = asyncio.run(run())
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert left == [], f"left behind: {left}"
    return result


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_dead(pid: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.02)


def test_results_come_back_as_plain_data():
    async def use(pool):
        assert (await pool.run(spec("fine"), {"x": [1, "a", None]}))["x"] == [1, "a", None]
        assert await pool.run(spec("wait"), {"x": 41}) == 42
        return [await pool.run(spec("fine"), {"x": 0}) for _ in range(3)]

    pids = {result["pid"] for result in with_pool(use)}
    assert len(pids) == 3, "each job has a process of its own"


def patience(name: str, timeout_s: float) -> float:
    """Jobs that hang are cut short; those that fail by themselves may take their time."""
    return timeout_s if KINDS.get(name) == "timeout" else 20.0


def test_every_kind_of_hostile_job_fails_as_itself_and_its_worker_goes_on():
    async def use(pool):
        worker, ends = pool.workers[0].process.pid, {}
        for name in KINDS:
            failed = await pool.run(spec(name), {}, patience(name, 0.3))
            ends[name] = failed.kind if isinstance(failed, JobFailed) else failed
            assert (await pool.run(spec("fine"), {"x": 2}))["x"] == 2
            assert pool.workers[0].process.pid == worker, f"{name} cost a worker"
        return ends

    assert with_pool(use, num_workers=1, memory_mb=256) == KINDS


def hammer(num_jobs: int, timeout_s: float) -> Counter[str]:
    """Hostile jobs of every kind in turn, among them good ones that must succeed."""

    async def use(pool):
        turn = [*KINDS, "fine"]
        names = [turn[i % len(turn)] for i in range(num_jobs)]
        jobs = [
            pool.run(spec(name), {"x": i} if name == "fine" else {}, patience(name, timeout_s))
            for i, name in enumerate(names)
        ]
        results = await asyncio.gather(*jobs)
        assert len(pool.workers) == 2 and pool.idle.qsize() == 2
        for i, (name, result) in enumerate(zip(names, results, strict=True)):
            if name == "fine":
                assert result["x"] == i
            else:
                assert isinstance(result, JobFailed) and result.kind == KINDS[name], str(result)
        return Counter(names)

    return with_pool(use, memory_mb=160)


def test_the_pool_is_whole_after_hostile_jobs_by_the_dozen():
    assert hammer(4 * (len(KINDS) + 1), timeout_s=0.1)["fork_bomb"] == 4


@pytest.mark.full  # what is before it, ten times over
@pytest.mark.slow
def test_hundreds_of_hostile_jobs_end_in_bounded_time():
    started = time.monotonic()
    counts = hammer(40 * (len(KINDS) + 1), timeout_s=0.1)
    assert sum(num for name, num in counts.items() if name in KINDS) >= 400
    assert time.monotonic() - started < 240  # some 20 s; the jobs would take for ever


def test_where_processes_are_allowed_bombs_are_stopped_and_orphans_ended(tmp_path):
    async def use(pool):
        bomb = await pool.run(spec("bounded_bomb"), {})
        assert isinstance(bomb, JobFailed) and bomb.kind in ("processes", "error"), str(bomb)
        assert await pool.run(spec("daemon"), {"path": str(tmp_path / "pid")}) == 1.0
        pid = int((tmp_path / "pid").read_text())
        assert not is_alive(pid), "the daemon is gone when its job is over"
        assert (await pool.run(spec("fine"), {"x": 3}))["x"] == 3

    with_pool(use, allow_processes=True, num_workers=1)


def test_a_cancelled_job_is_ended_and_its_worker_kept(tmp_path):
    async def use(pool):
        job = {"path": str(tmp_path / "pid"), "seconds": 600}
        task = asyncio.create_task(pool.run(spec("sleep"), job, 600.0))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        worker = pool.workers[0].process.pid
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await pool.run(spec("fine"), {"x": 1}))["x"] == 1
        assert pool.workers[0].process.pid == worker
        wait_until_dead(int((tmp_path / "pid").read_text()))

    with_pool(use, num_workers=1)


@pytest.mark.parametrize("turns", range(6))
def test_a_job_that_is_cancelled_at_once_holds_up_no_other(tmp_path, turns):
    """The end of the job may be in the message that asks for it."""

    async def use(pool):
        job = {"path": str(tmp_path / "pid"), "seconds": 600}
        task = asyncio.create_task(pool.run(spec("sleep"), job, 600.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(60):
            return await pool.run(spec("fine"), {"x": 1})

    assert with_pool(use, num_workers=1)["x"] == 1


def test_a_worker_that_is_killed_is_replaced_and_its_job_says_so(tmp_path, caplog):
    async def use(pool):
        job = {"path": str(tmp_path / "pid"), "seconds": 600}
        task = asyncio.create_task(pool.run(spec("sleep"), job, 600.0))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        os.kill(pool.workers[0].process.pid, signal.SIGKILL)
        failed = await task
        assert isinstance(failed, JobFailed) and failed.kind == "lost"
        wait_until_dead(int((tmp_path / "pid").read_text()))
        assert (await pool.run(spec("fine"), {"x": 1}))["x"] == 1

    with_pool(use, num_workers=1)
    lost, again = caplog.messages[-2:]
    assert "a reward worker died" in lost and "a reward worker was replaced" in again


@pytest.mark.parametrize("kills_worker", [False, True])
def test_a_parent_that_is_killed_leaves_no_process_and_its_folder_to_the_next(
    tmp_path, monkeypatch, kills_worker
):
    code = f"""
import asyncio
from pentad.rewards.sandbox import Sandbox
from pentad.rewards.section import RewardConfig
async def main():
    pool = Sandbox(RewardConfig(num_workers=1, allow_processes=True), [{spec("fine")!r}])
    await pool.start()
    print(pool.workers[0].process.pid, flush=True)
    await pool.run({spec("sleep")!r}, {{"path": {str(tmp_path / "pid")!r}, "seconds": 600}}, 600.0)
asyncio.run(main())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    worker = int(parent.stdout.readline())
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    parent.kill()
    if kills_worker:
        os.kill(worker, signal.SIGKILL)
    parent.communicate()
    wait_until_dead(worker)
    wait_until_dead(int((tmp_path / "pid").read_text()))
    assert len(list(tmp_path.glob("pentad-jobs-*"))) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with_pool(lambda pool: pool.run(spec("fine"), {"x": 1}))
    assert list(tmp_path.glob("pentad-jobs-*")) == []


def test_a_jobs_files_are_removed_however_deep_or_closed_they_are():
    async def use(pool):
        assert await pool.run(spec("write_files"), {}) == 1.0
        return [path.name for path in Path(pool.folder).iterdir()]

    assert with_pool(use, num_workers=1) == [scratch.OWNER]


def test_a_reward_module_that_hangs_or_fails_to_import_is_a_sentence(tmp_path):
    (tmp_path / "hangs.py").write_text("import time\nwhile True: time.sleep(1)\n")
    (tmp_path / "fails.py").write_text("import no_such_library\n")
    (tmp_path / "leaves.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "lacks.py").write_text("x = 1\n")
    for name, message in [
        ("hangs", "no answer within 1 s"),
        ("fails", "No module named 'no_such_library'"),
        ("leaves", "it ended or sent invalid data"),
        ("lacks", "has no attribute 'f'"),
    ]:

        async def start(name=name) -> None:
            limit = 1.0 if name == "hangs" else 30.0
            pool = pool_of([f"{tmp_path}/{name}.py:f"], start_timeout_s=limit)
            await pool.start()

        before = len(psutil.Process().children(recursive=True))
        with pytest.raises(UserError, match=message):
            asyncio.run(start())
        assert len(psutil.Process().children(recursive=True)) == before


def test_a_memory_limit_below_what_the_imports_take_is_refused(tmp_path):
    (tmp_path / "big.py").write_text("import mmap\nm = mmap.mmap(-1, 600 << 20)\ndef f(): pass\n")
    pool = pool_of([f"{tmp_path}/big.py:f"])
    with pytest.raises(UserError, match=r"reward.memory_mb = 512: a worker takes \d+ MiB before"):
        asyncio.run(pool.start())


def test_isolated_programs_that_may_start_processes_are_refused():
    with pytest.raises(UserError, match="isolated programs cannot start processes"):
        pool_of(isolate=True, allow_processes=True)


def test_a_worker_imports_nothing_heavy():
    code = "import sys, json, pentad.rewards.warden, pentad.rewards.calls\n"
    code += "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "transformers"} & set(json.loads(out.stdout))


# --- isolation: programs nobody has read ------------------------------------------------------

REFUSED = {
    "network": "import socket; socket.socket()",
    "unix sockets": "import socket; socket.socket(socket.AF_UNIX)",
    "fork": "import os; os.fork()",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "subprocess": "import subprocess; subprocess.run(['true'])",
    "signals to others": "import os; os.kill(os.getppid(), 0)",
    "signals to all": "import os; os.kill(-1, 0)",
    "reading files": f"open({str(FILE)!r}).read()",
    "reading processes": "open('/proc/self/environ').read()",
    "writing files": f"open({tempfile.gettempdir() + '/pentad-evil'!r}, 'w')",
    "secrets of the system": "open('/etc/shadow').read()",
    "rights of files": "import os; os.chmod('.', 0)",
    "old processes' memory": "import ctypes; l = ctypes.CDLL(None, use_errno=True)\n"
    "assert l.ptrace(16, 1, 0, 0) == 0 or ctypes.get_errno() != 1",
}
ALLOWED = {
    "standard input": "print(sum(map(int, input().split())))",
    "leaving": "import sys; print(3); sys.exit()",
    "leaving at once": "import os; os.write(1, b'3'); os._exit(0)",
    "threads": "import threading as t; a = t.Thread(target=print, args=(3,)); a.start(); a.join()",
    "threads left running": "import threading, time\ndef f(): time.sleep(0.1); print(3)\n"
    "threading.Thread(target=f).start()",
    "daemons left running": "import threading, time\nprint(3)\n"
    "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "classes that look up their module": "from __future__ import annotations\n"
    "import dataclasses, typing\n@dataclasses.dataclass\nclass P:\n    x: int = 3\n"
    "assert typing.get_type_hints(P) == {'x': int}\nprint(P().x)",
    "scratch files": "import tempfile\nf = tempfile.TemporaryFile(); f.write(b'x'); print(3)",
    "the standard library": "import asyncio, heapq, decimal, fractions, datetime, re; print(3)",
    "libraries": "import numpy; print(int(numpy.arange(3).sum()))",
}


def run_programs(sources: dict[str, str]) -> dict[str, object]:
    async def use(pool):
        run, job = "pentad.rewards.calls:print_output", {"stdin": "1 2\n"}
        return {
            name: await pool.run(run, job | {"source": source}, capture="stdout")
            for name, source in sources.items()
        }

    preload = ("pentad.rewards.calls:print_output",)
    return with_pool(use, preload=preload, num_workers=1, isolate=True)


def test_a_program_nobody_has_read_reaches_nothing_beyond_itself():
    results = run_programs(REFUSED)
    assert {name: str(result) for name, result in results.items()} == dict.fromkeys(
        REFUSED, "error: exit code 1"
    )
    assert not Path(tempfile.gettempdir(), "pentad-evil").exists()


def test_an_ordinary_program_runs_as_usual():
    results = run_programs(ALLOWED)
    assert {name: str(result).strip() for name, result in results.items()} == dict.fromkeys(
        ALLOWED, "3"
    )


def test_a_program_sees_none_of_the_runs_secrets(monkeypatch):
    """All that a program sees is what the pool sets itself (docs/security.md)."""
    for name in ("HF_TOKEN", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, "/very/secret")
    [seen] = run_programs({"env": "import os; print(sorted(os.environ))"}).values()
    fixed = {"PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM", "LANG"}
    fixed |= {f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL")}
    assert set(ast.literal_eval(seen)) - {"LC_CTYPE"} == fixed | {"HOME", "TMPDIR"}


def test_protections_are_tried_out_before_the_first_job(monkeypatch):
    """A worker whose filter lets everything pass is found out by its effect."""
    allow_all = r"c.build_filter = lambda **k: b'\x06\0\0\0\0\0\xff\x7f'"
    spoilt = f"import pentad.rewards.confine as c; {allow_all}; "
    monkeypatch.setattr(process, "BOOT", process.BOOT + spoilt)
    with pytest.raises(UserError, match="does not offer: processes.* a job can start processes"):
        asyncio.run(pool_of(isolate=True).start())

    async def use(pool):
        return await pool.run(spec("fine"), {"x": 1})

    assert with_pool(use, allow_weaker=True)["x"] == 1
