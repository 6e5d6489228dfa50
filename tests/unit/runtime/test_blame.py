"""Which of several failures is named: the cause, not its consequences."""

import json
from dataclasses import asdict

import pytest

from pentad.core.errors import Problem, RunError, UserError
from pentad.runtime.report import (
    Failure,
    describe_exit,
    describe_failure,
    failure_of,
    first_failure,
    tail,
)


def failure(rank, kind, message, at, lines=()):
    return Failure(rank, 1, kind, message, at, lines=lines)


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection reset by peer [127.0.0.1]:53"
WATCHDOG = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"


@pytest.mark.parametrize(
    ("failures", "wanted"),
    [
        ([("bug", LOST, 1.0), ("bug", "KeyError: 3", 2.0)], 1),
        ([("bug", LOST, 1.0), ("died", "was ended by signal 9 (SIGKILL)", 3.0)], 1),
        ([("run", "out of memory", 2.0), ("bug", "KeyError: 3", 1.0)], 1),
        ([("bug", LOST, 2.0), ("bug", LOST, 1.0)], 1),
        ([("bug", LOST, 1.0), ("stuck", "did not answer", 5.0)], 1),
        ([("user", "bad", 1.0), ("stuck", "did not answer", 0.0)], 0),
        ([("stuck", "reported no step", 7.0), ("stuck", "reported no step", 6.0)], 1),
    ],
)
def test_the_cause_outweighs_what_followed(failures, wanted):
    found = first_failure([failure(i, *one) for i, one in enumerate(failures)])
    assert found.rank == wanted


def test_a_process_that_nccl_ended_for_waiting_is_no_cause():
    waiting = Failure(0, 1, "died", "was ended by signal 6 (SIGABRT)", 1.0, lines=("x", WATCHDOG))
    assert waiting.is_consequence
    assert first_failure([waiting, failure(1, "stuck", "did not answer", 4.0)]).rank == 1
    aborted = Failure(0, 1, "died", "was ended by signal 6 (SIGABRT)", 1.0, lines=("free()",))
    assert not aborted.is_consequence


def test_reports_survive_their_way():
    for error in (
        UserError([Problem("a = 1", "is bad", "try 2"), "another"]),
        RunError("no memory"),
        ValueError("odd"),
    ):
        said = describe_failure(3, None, error)
        assert failure_of(json.loads(json.dumps(asdict(said)))) == said
    assert describe_failure(0, 1, UserError([Problem("a = 1", "is bad")])).problems == (
        "a = 1: is bad.",
    )


def test_exit_codes_are_put_into_words():
    assert describe_exit(3) == "ended with exit code 3"
    assert "signal 15 (SIGTERM)" in describe_exit(-15)
    assert "memory" in describe_exit(-9) and "memory" not in describe_exit(-11)
    assert "signal 99 (unknown)" in describe_exit(-99)


def test_the_tail_of_a_long_log_is_its_last_lines(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {i} \xff\n\n" for i in range(100_000)))
    assert tail(log, 2) == ("line 99998 \xff", "line 99999 \xff")
    assert tail(tmp_path / "none") == ()
