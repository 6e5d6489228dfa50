"""Role processes of this machine: they serve, beat, and end with whoever started them."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pentad.core.errors import InfraFailure, RunError, UserError
from pentad.runtime import roles
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.roles import RoleSpec

pytestmark = pytest.mark.usefixtures("started_cold")


def spec(folder, payload=None, **more):
    given = {"name": "rollout-0", "target": "role_targets:make", "payload": payload or {}}
    return RoleSpec(**{**given, "log": folder / "log" / "rollout-0.log", **more})


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@asynccontextmanager
async def running(wanted, **more):
    runtime = LocalRuntime()
    try:
        process = await runtime.start(wanted)
        connection = await roles.connect(process, **more)
        try:
            yield process, connection
        finally:
            await connection.close()
    finally:
        await runtime.close()
        assert not is_alive(process.process.pid)


def play(scenario, wanted, **more):
    async def main():
        async with running(wanted, **more) as (process, connection):
            return await asyncio.wait_for(scenario(process, connection), 60)

    return asyncio.run(main())


def test_methods_are_served_and_the_environment_is_that_of_the_spec(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    names = ["CUDA_VISIBLE_DEVICES", "OWN", "RANK"]
    core = max(os.sched_getaffinity(0))
    wanted = spec(tmp_path, devices=(2, 0), cores=(core,), environment={"OWN": "x"})

    async def scenario(process, connection):
        with pytest.raises(RunError, match="rollout-0 has no method nothing"):
            await connection.call("nothing")
        with pytest.raises(RunError, match="no method __init__"):
            await connection.call("__init__", payload={}, emit=None)
        with pytest.raises(RunError, match="no method stats"):
            await connection.call("stats")
        return process.process.pid, await connection.call("environment", names=names)

    pid, (own, cores, values) = play(scenario, wanted)
    assert own == pid and cores == [core]
    assert values == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a", "OWN": "x", "RANK": None}


def test_beats_carry_stats_also_while_the_object_is_made(tmp_path):
    beats = []

    async def scenario(process, connection):
        while len(beats) < 2:
            await asyncio.sleep(0.05)
        (tmp_path / "now").touch()
        assert await connection.call("echo", x=1) == {"x": 1}
        while not (beats and beats[-1].get("num_calls")):
            await asyncio.sleep(0.05)

    wanted = spec(tmp_path, {"made_when": str(tmp_path / "now")})
    play(scenario, wanted, on_event=lambda name, v: beats.append(v))
    assert beats[:2] == [{}, {}] and beats[-1] == {"num_calls": 1, "num_cancelled": 0}


@pytest.mark.parametrize(
    ("fault", "kind", "sentence"),
    [
        ("UserError", UserError, "x = 1: is wrong; use 2"),
        ("KeyError", RunError, "rollout-0 could not be made: KeyError"),
    ],
)
def test_an_object_that_cannot_be_made_says_why(tmp_path, fault, kind, sentence):
    async def scenario(process, connection):
        for _ in range(2):
            with pytest.raises(kind, match=sentence):
                await connection.call("echo")

    play(scenario, spec(tmp_path, {"fails": fault}))


def test_a_process_that_ends_at_once_is_an_error_with_its_last_words(tmp_path):
    async def main():
        runtime = LocalRuntime()
        wanted = spec(tmp_path, environment={"PYTHONHASHSEED": "nonsense"})
        try:
            process = await runtime.start(wanted)
            with pytest.raises(InfraFailure, match="rollout-0 ended with exit code 1; .*HASHSEED"):
                await roles.connect(process)
        finally:
            await runtime.close()

    asyncio.run(main())


def test_it_ends_in_order_when_its_caller_leaves(tmp_path):
    note = tmp_path / "note"

    async def scenario(process, connection):
        await connection.call("echo")
        await connection.close()
        while process.poll() is None:
            await asyncio.sleep(0.02)
        return process.poll()

    assert play(scenario, spec(tmp_path, {"note": str(note)})).startswith("ended with exit code 0")
    assert note.read_text() == "closed"


def test_a_killed_process_is_a_lost_connection_and_says_how(tmp_path):
    async def scenario(process, connection):
        call = asyncio.ensure_future(connection.call("late", value=1, seconds=60))
        await connection.call("echo")
        os.kill(process.process.pid, signal.SIGKILL)
        with pytest.raises(InfraFailure, match="rollout-0: the connection is lost"):
            await call
        while process.poll() is None:
            await asyncio.sleep(0.02)
        return process.poll()

    assert "SIGKILL" in play(scenario, spec(tmp_path))


@pytest.mark.parametrize("how", ["stopped", "blocked"])
def test_a_process_that_hangs_is_noticed_by_its_silence(tmp_path, how):
    async def scenario(process, connection):
        await connection.call("echo")
        call = asyncio.ensure_future(connection.call("block", until=str(tmp_path / "never")))
        if how == "stopped":
            os.kill(process.process.pid, signal.SIGSTOP)
        with pytest.raises(InfraFailure, match="it sent nothing for 4 s"):
            await call
        process.stacks()

    play(scenario, spec(tmp_path), patience_s=4.0)


def test_stacks_are_written_to_the_log(tmp_path):
    async def scenario(process, connection):
        call = asyncio.ensure_future(connection.call("block", until=str(tmp_path / "end")))
        while "in block" not in process.log.read_text():
            process.stacks()
            await asyncio.sleep(0.1)
        (tmp_path / "end").touch()
        await call

    play(scenario, spec(tmp_path))


STARTER = """
    import asyncio, sys, time
    from pathlib import Path
    from pentad_tools.chaos.spares import SPARES, make_spares
    from test_role_processes import LocalRuntime, roles, spec

    make_spares(int(sys.argv[2]))
    known = [one.process.pid for one in SPARES]

    async def main():
        process = await LocalRuntime().start(spec(Path(sys.argv[1])))
        connection = await roles.connect(process)
        await connection.call("echo")
        assert known[:1] in ([], [process.process.pid])
        print(*dict.fromkeys([process.process.pid, *known]), flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("num_spares", [0, 2])
def test_it_ends_with_its_parent_whether_it_was_started_or_forked(tmp_path, num_spares):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STARTER), str(tmp_path), str(num_spares)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    pids = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(pids) == max(num_spares, 1) and all(map(is_alive, pids))
    shown = Path(f"/proc/{pids[0]}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
    assert b"-m pentad.runtime.role_host rollout-0" in shown
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_token_is_nobody_elses(tmp_path):
    """It stands neither on the command line nor in a file that outlives the start."""

    async def scenario(process, connection):
        await connection.call("echo")
        shown = Path(f"/proc/{process.process.pid}/cmdline").read_bytes()
        shown += Path(f"/proc/{process.process.pid}/environ").read_bytes()
        assert process.token.encode() not in shown

    play(scenario, spec(tmp_path))


def test_what_a_process_draws_follows_from_the_seed_and_its_name(tmp_path):
    async def scenario(process, connection):
        return await connection.call("draw")

    def drawn(**more):
        return play(scenario, spec(tmp_path, **more))

    first = drawn(seed=5)
    assert drawn(seed=5) == first and len(set(first)) == 2
    assert not {*first} & {*drawn(seed=6)} and not {*first} & {*drawn(seed=5, name="rollout-1")}
