"""Programs that nobody has read reach nothing, as root and as an ordinary user, with and without
namespaces; and a machine that lacks a protection is found out before the first job."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from tables import table

from pentad.cli.doctor import check_isolation
from pentad.core.errors import UserError
from pentad.rewards import breakout
from pentad.rewards.breakout import AMOUNTS
from pentad.rewards.sandbox import Sandbox, what_is_missing
from pentad.rewards.section import RewardConfig
from pentad.runtime import process as process_file

HERE = Path(__file__).parent
USERS = ["root", "ordinary"] if os.getuid() == 0 else ["ordinary"]


LACKING = asyncio.run(what_is_missing())
needs_namespaces = pytest.mark.skipif("namespaces are refused" in LACKING, reason=LACKING)


def command(user: str, *arguments: str) -> list[str]:
    lowered = [str(HERE / "as_user.py")] if user == "ordinary" and os.getuid() == 0 else []
    return [sys.executable, *lowered, str(HERE / "attack.py"), *arguments]


def attack(user: str, *arguments: str) -> dict[str, str]:
    """By attack: what was reached, harmed or lost. Nothing is left out, held attacks are empty."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    out = subprocess.run(
        command(user, *arguments), capture_output=True, text=True, env=environment, timeout=540
    )
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def attack_as_all(*arguments: str) -> dict[str, dict[str, str]]:
    """By user; at the same time, as most of it is waiting for time limits."""
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda user: attack(user, *arguments), USERS)
        return dict(zip(USERS, found, strict=True))


@needs_namespaces
def test_no_known_break_out_gets_anywhere():
    for user, found in attack_as_all("break_outs", "enclosed").items():
        assert {name: got for name, got in found.items() if got} == {}, user


def test_without_namespaces_only_amounts_are_not_held():
    for user, found in attack_as_all("break_outs", "refused").items():
        got = {name for name, result in found.items() if result}
        assert got <= ({"threads"} if user == "root" else set()), (user, found)


@needs_namespaces
@pytest.mark.parametrize("num_jobs", table([60, 200], [200]))
def test_random_hostile_jobs_harm_nobody_and_the_pool_stays_whole(num_jobs):
    found = attack_as_all("random", "11", str(num_jobs))
    assert found == {user: {} for user in USERS}


@needs_namespaces
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("was_stopped", [False, True])
def test_a_job_does_not_outlive_its_pool_and_worker(user, was_stopped):
    """Also if the worker has just stopped its processes, to kill them."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    pool = subprocess.Popen(
        command(user, "outlive"), stdout=subprocess.PIPE, text=True, env=environment
    )
    worker, folder, file = json.loads(pool.stdout.readline())
    deadline = time.monotonic() + 90.0
    while len(family := [psutil.Process(worker), *psutil.Process(worker).children(True)]) < 5:
        assert time.monotonic() < deadline, f"no job below the worker: {family}"
        time.sleep(0.02)
    time.sleep(0.3)  # it has asked not to die with its parent
    below_pool = psutil.Process(pool.pid).children(recursive=True)
    for process in family[1:] if was_stopped else ():
        process.suspend()
    for pid in (pool.pid, worker):
        os.kill(pid, 9)
    pool.wait()
    pool.stdout.close()
    deadline = time.monotonic() + 60.0
    while (alive := [p for p in family if is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in filter(is_alive, below_pool):
        process.kill()
    for left in (folder, Path(file).parent):  # a pool that starts meanwhile may have removed one
        shutil.rmtree(left, ignore_errors=True)
    assert alive == []


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- what a pool finds out at its start -------------------------------------------------------

FILTER_OFF = r"import pentad.rewards.confine as c; c.build_filter = lambda **k: "
FILTER_OFF += r"b'\x06\0\0\0\0\0\xff\x7f'; "
REFUSED = "import pentad.rewards.enclosure as e; "
REFUSED += "e.enclose = lambda limits: (_ for _ in ()).throw(OSError('not here')); "
OLD_KERNEL = "import pentad.rewards.confine as c; c.RIGHTS_BY_ABI = {{1: (1 << {}) - 1}}; "
SPOILT = {
    "no filter": (FILTER_OFF, {"processes", "ending with its worker", "memory"}),
    "Landlock 1": (REFUSED + OLD_KERNEL.format(13), {"writing files"}),
    "Landlock 2": (REFUSED + OLD_KERNEL.format(14), {"writing files"}),
    "no Landlock": (
        REFUSED + "import pentad.rewards.confine as c; c._restrict_files = lambda scratch: 0; ",
        {"reading files", "writing files"},
    ),
    "neither": (FILTER_OFF + REFUSED, set(breakout.MEANING) - {"reading files", "writing files"}),
    "a scratch without end": (
        "import pentad.rewards.enclosure as e; m = e._mount; "
        "e._mount = lambda s, t, f, o='': m(s, t, f, 'mode=777' if 'inodes' in o else o); ",
        {"total size of files"},
    ),
    "any number of threads": (
        "import resource as r; s = r.setrlimit; "
        "r.setrlimit = lambda k, v: s(k, v) if k != r.RLIMIT_NPROC else 0; ",
        {"threads"},
    ),
}


def spoil(monkeypatch, code: str) -> None:
    monkeypatch.setattr(process_file, "BOOT", process_file.BOOT + code)


def start(**changes) -> None:
    async def run():
        pool = Sandbox(RewardConfig(num_workers=1, **changes), isolate=True)
        await pool.start()
        await pool.close()

    asyncio.run(run())


@needs_namespaces
@pytest.mark.parametrize("name", SPOILT)
def test_a_missing_protection_is_found_by_trying(monkeypatch, name):
    code, lacking = SPOILT[name]
    by_user = AMOUNTS if REFUSED in code else set()
    spoil(monkeypatch, code)
    told = asyncio.run(what_is_missing())
    found = {name for name in breakout.MEANING if name in told.partition(" a job can ")[0]}
    assert lacking - by_user <= found <= lacking | by_user, told
    assert all(breakout.MEANING[name] in told for name in found)
    assert ("namespaces are refused: not here" in told) == (REFUSED in code)
    finding = check_isolation()
    assert finding.status == "warn" and finding.text == told


def test_a_run_is_refused_where_jobs_could_reach_something(monkeypatch, caplog):
    spoil(monkeypatch, FILTER_OFF)
    with pytest.raises(UserError, match="a job can start processes.*allow_weaker = true"):
        start()
    start(allow_weaker=True)
    [line] = [record.getMessage() for record in caplog.records]
    assert "does not offer: processes" in line


def test_where_only_amounts_are_not_held_a_run_says_so_and_goes_on(monkeypatch, caplog):
    spoil(monkeypatch, REFUSED)
    start()
    [line] = [record.getMessage() for record in caplog.records]
    assert "not here" in line and "a job can" in line and "fill the disk" in line


@needs_namespaces
def test_doctor_says_that_programs_are_isolated():
    assert check_isolation().status == "ok"
