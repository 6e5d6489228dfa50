"""The slow rank of a group: named when others wait for it, and not before."""

import gc
import json
import subprocess
import sys
import threading
import time

import pytest

from pentad.runtime import report, standby
from pentad.runtime.local_roles import COMMAND
from pentad.runtime.pace import STEPS, Pace, WaitMeter
from pentad.runtime.process import frame_of
from pentad.runtime.standby import StandbyPool

pytestmark = pytest.mark.usefixtures("started_cold")


def test_a_rank_that_waits_least_is_named_once(caplog):
    pace = Pace(4)
    for step in range(2 * STEPS):
        pace.take("step", 1.0, [0.6, 0.65, 0.05, 0.6], step)
        pace.take("save", 0.5, [0.1, 0.1, 0.1, 0.1], step)  # in which all are alike
        assert pace.straggler == (2 if step + 1 >= STEPS else None)
    (said,) = caplog.messages
    assert said.startswith("straggler: rank 2 of 4, step 2: computes 0.95 s of a call (step) of 1")
    pace.take("step", 1.0, [0.6, 0.6, 0.6, 0.6], 9)
    assert pace.straggler is None


def test_even_ranks_short_calls_and_single_ones_are_left_alone(caplog):
    for seconds, waits in [(1.0, [0.3, 0.3, 0.1]), (0.05, [0.04, 0.0, 0.04])]:
        pace = Pace(3)
        for step in range(9):
            pace.take("step", seconds, waits, step)
    for step in range(9):  # now one, now another
        pace.take("step", 1.0, [0.9, 0.0, 0.9] if step % 2 else [0.0, 0.9, 0.9], step)
    Pace(1).take("step", 1.0, [0.0], 1)
    assert not caplog.messages


def test_waits_are_seen_where_the_thread_stands(tmp_path, monkeypatch):
    """A function of a file that waits for others, beside one that computes."""
    meter, go = WaitMeter(), threading.Event()
    code = compile("def wait(go):\n    go.wait(60)\n", "site/torch/distributed/wait.py", "exec")
    made = {}
    exec(code, made)

    def work():
        meter.watch()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            sum(range(1000))
        seen.append(meter.waited_s)
        made["wait"](go)

    seen = []
    thread = threading.Thread(target=work)
    thread.start()
    until = time.monotonic() + 60
    while meter.waited_s < 0.2 and time.monotonic() < until:
        time.sleep(0.02)
    go.set(), thread.join()
    assert seen == [0.0] and meter.waited_s >= 0.2


def test_stacks_of_all_ranks_are_kept_in_one_file(tmp_path):
    logs = [tmp_path / "rank-0.log", tmp_path / "rank-1.log"]
    for log in logs:
        log.write_text("before\n")
    sizes = [report.size_of(log) for log in logs]
    with logs[1].open("a") as file:
        file.write("Current thread 0x1:\n  File x.py, line 3\n")
    report.save_stacks([("learner-0", logs[0]), ("learner-1", logs[1])], sizes)
    text = (tmp_path / report.STACKS).read_text()
    assert "## learner-0\nwrote nothing: it does not run\n## learner-1\nCurrent thread" in text
    assert "before" not in text


def test_a_standby_takes_a_job_with_its_name_log_and_environment(tmp_path):
    """One that is not needed ends with its pool."""
    pool = StandbyPool(COMMAND, 2, ["json"], {**standby.os.environ})
    try:
        pool.fill()
        until = time.monotonic() + 120
        while len(pool.ready) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        spare = pool.ready[1].process
        job = {"log": str(tmp_path / "a.log"), "name": "learner-7", "standing_in": {"A": "b"}}
        process = pool.take(job)  # it lacks all else: what it says of that is in its log
        assert process.wait(120) and process.code != 0
        words = (tmp_path / "a.log").read_text()
        assert "KeyError" in words, words
        assert len(pool.ready) == 1
    finally:
        pool.close()
    assert spare.ended() is not None and pool.take({}) is None


def test_a_standby_is_listed_under_the_name_it_took():
    code = (
        "import json, pathlib, pentad.runtime.standby as s;"
        "s.rename('learner-12');"
        "print(json.dumps(pathlib.Path('/proc/self/cmdline').read_text().strip('\\0')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, standby.NAME, "json", "3", "1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout).endswith("\0learner-12")


def wait_for(condition, limit_s=120):
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_standby_that_fails_costs_none_of_those_that_were_taken():
    pool = StandbyPool(COMMAND, 1, ["json"], {**standby.os.environ})
    pool.fill()
    wait_for(lambda: pool.ready)
    taken = pool.ready.pop()
    pool.modules = ["no_such_module_anywhere"]
    pool.fill()
    wait_for(lambda: pool.count == 0)
    pool.fill()
    assert taken.process.is_running
    taken.end()
    pool.close()


def test_no_collection_runs_while_a_thread_is_looked_at(monkeypatch):
    """CPython before 3.11.8 may deadlock: what is freed there gives up the interpreter's lock."""
    seen = []
    look = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or look())
    assert frame_of(threading.get_ident()) is not None
    assert seen == [False] and gc.isenabled()
