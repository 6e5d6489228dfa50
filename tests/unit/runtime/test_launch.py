"""Groups of local processes: they start alike, are watched, and end together, whatever happens."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pentad.core.errors import RunError, UserError
from pentad.runtime import launch
from pentad.runtime.environment import DETERMINISTIC
from pentad.runtime.launch import LaunchSettings, run_ranks

LIGHT = LaunchSettings(has_group=False)
PROGRAM = Path(__file__).parent / "rank_targets.py"


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)


@pytest.fixture
def started(monkeypatch):
    """Every process the launcher started in a test; none may be left when it ends."""
    pids = []
    plain = subprocess.Popen

    class Noting(plain):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            pids.append(self.pid)

    monkeypatch.setattr(launch.subprocess, "Popen", Noting)
    yield pids
    assert pids and not [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return state != "Z"


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def run(target, payload, tmp_path, world=3, **settings):
    chosen = LaunchSettings(has_group=False, **settings)
    name = f"rank_targets:{target}"
    return run_ranks(name, payload, world=world, log_folder=tmp_path / "logs", settings=chosen)


def test_every_rank_knows_its_place_and_returns_its_result(tmp_path, started, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    results = run("describe", {"a": [1, "x"]}, tmp_path)
    assert [r["rank"] for r in results] == [[0, 3, 0], [1, 3, 1], [2, 3, 2]]
    assert [r["RANK"] for r in results] == ["0", "1", "2"]
    assert {r["WORLD_SIZE"] for r in results} == {"3"}
    assert {r["MASTER_ADDR"] for r in results} == {"127.0.0.1"}
    assert len({r["MASTER_PORT"] for r in results}) == 1
    assert {r["OMP_NUM_THREADS"] for r in results} == {str(max(1, os.cpu_count() // 3))}
    assert {r["NCCL_ALGO"] for r in results} == {None}
    assert all(r["payload"] == {"a": [1, "x"]} and not r["torch"] for r in results)


def test_what_determinism_needs_is_set_before_the_process_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    (found,) = run("describe", None, tmp_path, world=1, deterministic=True)
    wanted = {**DETERMINISTIC, "NCCL_ALGO": "Tree"}  # what the user chose stays
    assert {key: found[key] for key in wanted} == wanted


def test_rank_0_is_heard_and_all_ranks_are_logged(tmp_path, capfd):
    run("speak", None, tmp_path, world=2)
    heard = capfd.readouterr()
    assert "said by 0" in heard.out and "complained by 0" in heard.err
    assert "by 1" not in heard.out + heard.err
    logs = {p.name: p.read_text() for p in (tmp_path / "logs").iterdir()}
    assert logs.keys() == {"rank-0.log", "rank-1.log"}
    assert "complained by 0" in logs["rank-0.log"]
    assert logs["rank-1.log"] == "said by 1\ncomplained by 1\n"


@pytest.mark.parametrize(
    ("deed", "expected"),
    [
        ("give_up", r"rank 1 of 3, step 3: out of device memory in backward\n"),
        ("stumble", r"rank 1 of 3, step 3: KeyError: 'missing'\n(.*\n)*.*in stumble\n"),
        (
            "be_killed",
            r"step 3: was ended by signal 9 \(SIGKILL\), as .* memory.*\n.*my last words",
        ),
        ("crash", r"step 3: was ended by signal 11 \(SIGSEGV\)\n(.*\n)*.*in crash"),
        ("quit_silently", r"step 3: ended with exit code 7 and without a word"),
    ],
)
def test_a_rank_that_fails_ends_the_group_at_once_and_is_named(tmp_path, started, deed, expected):
    before = time.monotonic()
    with pytest.raises(RunError, match=expected) as caught:
        run("work", {"rank": 1, "deed": deed}, tmp_path)
    assert time.monotonic() - before < 90  # a second or two; the others would take 100
    assert str(tmp_path / "logs" / "rank-1.log") in str(caught.value)


def test_bad_input_found_by_a_rank_is_reported_as_it_is(tmp_path, started):
    with pytest.raises(UserError) as caught:
        run("work", {"rank": 2, "deed": "refuse"}, tmp_path)
    assert caught.value.problems == ["a.b = 1: is bad.", "c = 2: is worse; try 3."]


def test_the_cause_is_named_not_what_followed_from_it(tmp_path, started):
    with pytest.raises(RunError, match="rank 2 of 3, step 5: KeyError: 'the cause'"):
        run("lose", {"rank": 2, "folder": str(tmp_path)}, tmp_path)


def test_a_rank_that_others_wait_for_is_named_with_its_stack(tmp_path, started):
    with pytest.raises(RunError, match="rank 1 of 3, step 2: did not answer") as caught:
        run("wait_for_one", {"rank": 1, "folder": str(tmp_path)}, tmp_path)
    assert "in sleeping_in_a_loop" in str(caught.value)


def test_a_group_that_makes_no_step_is_ended_and_the_last_to_move_is_named(tmp_path, started):
    with pytest.raises(RunError, match="rank 1 of 2, step 4: reported no step.* s ago") as caught:
        payload = {"rank": 1, "folder": str(tmp_path)}
        run("stall", payload, tmp_path, world=2, stall_s=2.0)
    assert "in sleeping_in_a_loop" in str(caught.value)


def test_children_of_ranks_end_with_them(tmp_path, started):
    run("with_child", {"folder": str(tmp_path), "is_quick": True}, tmp_path, world=2)
    children = [int((tmp_path / f"child-{rank}").read_text()) for rank in range(2)]
    until(lambda: not any(map(is_alive, children)))


def test_what_cannot_be_imported_is_said(tmp_path, started):
    with pytest.raises(RunError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        run_ranks("no_such_module:f", None, world=2, log_folder=tmp_path, settings=LIGHT)


def test_a_launcher_in_another_thread_works_without_signal_handlers(tmp_path, started):
    results = []
    thread = threading.Thread(target=lambda: results.append(run("describe", 1, tmp_path, world=1)))
    thread.start()
    thread.join(120)
    assert results[0][0]["payload"] == 1


def program(tmp_path, target, payload=None, world=2, **settings):
    given = {
        "target": f"rank_targets:{target}",
        "payload": payload or {"folder": str(tmp_path), "rank": -1, "deed": ""},
        "world": world,
        "log_folder": str(tmp_path / "logs"),
        "settings": {"has_group": False, **settings},
    }
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), json.dumps(given)],
        stdout=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
    )


def alive_notes(tmp_path, world=2):
    notes = [tmp_path / f"alive-{rank}" for rank in range(world)]
    until(lambda: all(note.exists() and note.read_text() for note in notes))
    return [int(note.read_text()) for note in notes]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_a_signal_is_passed_on_and_ranks_may_tidy_up(tmp_path, number, code):
    main = program(tmp_path, "leave_notes")
    pids = alive_notes(tmp_path)
    main.send_signal(number)
    assert main.wait(60) == code
    assert not any(map(is_alive, pids))
    assert all((tmp_path / f"tidied-{rank}").exists() for rank in range(2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("is_sorry", [False, True])
def test_what_ranks_say_after_a_signal_counts(tmp_path, number, is_sorry):
    main = program(tmp_path, "heed", {"folder": str(tmp_path), "is_sorry": is_sorry})
    alive_notes(tmp_path)
    main.send_signal(number)
    out, _ = main.communicate(timeout=120)
    if is_sorry:  # both say it, so no rank is named
        kind = "Interrupted" if number == signal.SIGINT else "RunError"
        sentence = f"{kind}: stopped by signal {int(number)}, what was trained is saved\n"
        assert (main.returncode, out) == (1, sentence)
    else:
        assert (main.returncode, out) == (0, f"[{int(number)}, {int(number)}]\n")


def test_ranks_that_do_not_leave_are_ended_after_a_while(tmp_path):
    main = program(tmp_path, "ignore_signals", stop_s=0.5)
    pids = alive_notes(tmp_path)
    main.send_signal(signal.SIGTERM)
    assert main.wait(60) == 128 + signal.SIGTERM
    assert not any(map(is_alive, pids))


def test_ranks_end_when_their_launcher_is_killed(tmp_path):
    main = program(tmp_path, "work")
    pids = alive_notes(tmp_path)
    main.kill()
    main.wait(60)
    until(lambda: not any(map(is_alive, pids)))


def test_a_stopped_rank_does_not_keep_the_group_from_ending(tmp_path):
    main = program(
        tmp_path, "work", payload={"folder": str(tmp_path), "rank": 0, "deed": "give_up"}
    )
    pids = alive_notes(tmp_path)
    os.kill(pids[1], signal.SIGSTOP)
    out, _ = main.communicate(timeout=120)
    assert "rank 0 of 2, step 3: out of device memory" in out
    assert not any(map(is_alive, pids))
