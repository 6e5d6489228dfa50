"""Groups of ranks as processes: calls in one order, failures with their cause, and nothing left."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from role_processes import role_processes

from pentad.core.errors import Crashed, RunError, Transient, UserError
from pentad.runtime import rank_host
from pentad.runtime.environment import rank_environment
from pentad.runtime.group_calls import MEETING, RankGroup
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.rank import pulse
from pentad.runtime.roles import RoleSpec

pytestmark = pytest.mark.dist

LIMITS = {"stall_s": 300.0}


def make_group(folder, world=2, limits=LIMITS, **given):
    specs = [
        RoleSpec(
            name=f"learner-{rank}",
            target=rank_host.TARGET,
            payload={
                "rank": rank,
                "world": world,
                "device": "cpu",
                "timeout_s": 120.0,
                "num_threads": 1,
                "service": "group_targets:Noting",
                "given": given,
            },
            log=folder / f"rank-{rank}.log",
            environment=rank_environment(rank=rank, world=world, deterministic=False),
        )
        for rank in range(world)
    ]
    return RankGroup(LocalRuntime(), specs, **limits)


def pids():
    return role_processes(os.getpid(), "learner")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The temporary folder of the group and its ranks. However a group ends, nothing is left: no
    process, no thread, no folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not pids()
    assert not [one for one in threading.enumerate() if one.name == "rank group"]
    assert not list(folder.glob(f"*{MEETING}*"))


def test_calls_of_two_threads_come_to_all_ranks_in_one_order(tmp_path, caplog):
    caplog.set_level("INFO", "pentad.test")
    with make_group(tmp_path) as group:
        threads = [
            threading.Thread(
                target=lambda n=n: [group.call_all("note", by=n, at=i) for i in range(9)]
            )
            for n in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first, second = group.call_all("everyone")
        assert first == second and len(first) == 18
        assert group.call_all("note", text="ä", none=None, x=0.1) == [0, 19]
        assert group.query("note") == [0, 20]
        assert [len(seen) for seen in group.call_all("everyone")] == [20, 19], (
            "a question is rank 0's"
        )
        with pytest.raises(RunError, match="refused by rank 0"):
            group.call_all("refuse")
        assert group.call_all("note") == [0, 21] and not group.is_broken
    assert {record.getMessage() for record in caplog.records} == {"noted by 0"}


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("raise", Crashed, r"^rank 1 of 2, step 3: KeyError: 'x'\n"),
        ("kill", Transient, r"^rank 1 of 2, (step 3|before .*): was ended by signal 9"),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_the_group(tmp_path, how, kind, said):
    with make_group(tmp_path) as group:
        with pytest.raises(kind, match=said):
            group.call_all("harm", rank=1, how=how)
        with pytest.raises(kind, match=said):
            group.call_all("note")
        with pytest.raises(kind, match=said):
            group.query("note")


def test_a_rank_that_dies_between_calls_is_noticed(tmp_path):
    with make_group(tmp_path) as group:
        group.call_all("note")
        os.kill(pids()[1], signal.SIGKILL)
        deadline = time.monotonic() + 120
        with pytest.raises(Transient, match="rank 1 of 2, .*was ended by signal 9"):
            while time.monotonic() < deadline:
                group.check()
                time.sleep(0.05)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_before_it_has_joined_may_be_started_again(tmp_path, rank):
    with make_group(tmp_path) as group:
        deadline = time.monotonic() + 120
        while len(pids()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(pids()[rank], signal.SIGKILL)
        with pytest.raises(Transient, match=f"rank {rank} of 2, before its first step: was ended"):
            group.call_all("note")


def test_a_question_to_a_rank_that_hangs_ends_with_the_group(tmp_path):
    limits = {"stall_s": 2.0, "timeout_s": 2.0}
    with make_group(tmp_path, world=1, limits=limits) as group:
        group.call_all("step")  # its first: from then on silence is a hang
        os.kill(pids()[0], signal.SIGSTOP)
        with pytest.raises(Transient, match=r"rank 0 of 1, step 3: does not run \(it is stopped\)"):
            group.query("note")


def test_work_of_a_rank_between_calls_is_progress_of_the_scheduler(tmp_path):
    with make_group(tmp_path, world=1) as group:
        group.call_all("step")
        group.query("nap", seconds=2.0)
        before = pulse.count
        group.query("nap", seconds=2.0)
        assert pulse.count == before
        group.query("write", seconds=2.0)
        assert pulse.count > before


def test_bad_input_of_a_rank_is_reported_as_it_is(tmp_path):
    with make_group(tmp_path, bad_rank=1) as group, pytest.raises(UserError) as caught:
        group.call_all("note")
    assert caught.value.problems == ["a = 1: is bad."]


def test_a_group_that_is_left_in_mid_call_does_not_wait(tmp_path):
    began = 0.0
    with pytest.raises(KeyError), make_group(tmp_path, world=1) as group:
        group.call_all("note")
        thread = threading.Thread(
            target=lambda: pytest.raises(Exception, group.call_all, "nap", seconds=600)  # noqa: B017
        )
        thread.start()
        while not group.lock.locked():
            time.sleep(0.01)
        began = time.monotonic()
        raise KeyError("something else")
    assert time.monotonic() - began < 60
    thread.join(60)


def test_ranks_of_one_machine_meet_in_a_folder_that_no_other_user_can_open(tmp_path, temporary):
    with make_group(tmp_path) as group:
        group.call_all("note")
        (meeting,) = temporary.glob(f"*{MEETING}*")
        assert meeting.stat().st_mode & 0o777 == 0o700


SCHEDULER = """
import sys, time
from pathlib import Path
from test_groups import make_group

with make_group(Path(sys.argv[1])) as group:
    group.call_all("note")
    print("met", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_scheduler_left_is_removed_by_the_next_start(tmp_path, temporary):
    here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCHEDULER, str(tmp_path)]
    with subprocess.Popen(command, env=here, stdout=subprocess.PIPE, text=True) as scheduler:
        try:
            assert scheduler.stdout.readline() == "met\n", (tmp_path / "rank-0.log").read_text()
        finally:
            scheduler.kill()
    (left,) = temporary.glob(f"*{MEETING}*")
    with make_group(tmp_path) as group:
        group.call_all("note")
        assert not left.exists()
