"""Every hang of a run over ranks ends in bounded time, with the rank that hangs named last."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from run_cases import settings_of
from tables import table
from test_runs_over_ranks import Program, records_of, wait_for_steps

from pentad.data.toy import write_model, write_task
from pentad.telemetry.steps import read_lines

pytestmark = pytest.mark.dist

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
LIMIT_S = 6.0
SLACK_S = 120.0
"""Of a busy machine; without an end the runs below hang for ever."""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_task(folder, seed=5, num_train=16, num_sft=16, num_valid=2)
    return folder


def start(task, root, command, trial, launcher=()):
    layout = "archon:d2" if command == "sft" else "embedded:d1|archon:d2"
    endless = ("total_train_epochs=100000", "recover.retries=0")
    more = (*endless, f"stall_abort_s={LIMIT_S}", f"allocation_mode={layout}")
    return Program([command, *settings_of(task, root, command, trial, *more)], launcher)


def check_end(program, root, trial, rank, before):
    code, text = program.wait(LIMIT_S + SLACK_S)
    assert code == 1, text
    assert time.monotonic() - before > LIMIT_S / 2
    said = rf"rank {rank} of 2, .*: does not run \(it is stopped\), .* s ago"
    assert re.search(said, text[-3000:]), text[-3000:]
    records = records_of(root, trial)
    assert re.search(said, (records / "log.txt").read_text())
    other = (records / "ranks" / f"rank-{1 - rank}.log").read_text()
    assert "most recent call first" in other, "the stack of who waits"


@pytest.mark.parametrize(("command", "rank"), table([("sft", 1), ("train", 0)], [("sft", 1)]))
def test_a_rank_that_is_stopped_ends_the_run(task, tmp_path, command, rank):
    with start(task, tmp_path, command, "stop") as program:
        wait_for_steps(program, records_of(tmp_path, "stop"), 1)
        before = time.monotonic()
        os.kill(program.ranks()[rank], signal.SIGSTOP)
        check_end(program, tmp_path, "stop", rank, before)


@pytest.mark.full
@pytest.mark.usefixtures("started_cold")  # or the first step would come too soon
def test_a_rank_that_is_stopped_during_the_start_ends_the_run(task, tmp_path):
    with start(task, tmp_path, "sft", "early") as program:
        deadline = time.monotonic() + 120
        while len(program.ranks()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(1.0)  # it runs, and has not come to its first step
        assert not read_lines(records_of(tmp_path, "early") / "steps.jsonl")
        before = time.monotonic()
        os.kill(program.ranks()[1], signal.SIGSTOP)
        code, text = program.wait(LIMIT_S + 30 + SLACK_S)
    assert code == 1 and time.monotonic() - before > LIMIT_S / 2
    assert re.search(r"rank 1 of 2, before its first step: does not run \(it is stopped\)", text)


def test_one_sigterm_ends_a_run_that_hangs(task, tmp_path):
    with start(task, tmp_path, "train", "term") as program:
        wait_for_steps(program, records_of(tmp_path, "term"), 1)
        os.kill(program.ranks()[1], signal.SIGSTOP)
        time.sleep(0.5)
        program.process.send_signal(signal.SIGTERM)
        code, text = program.wait(LIMIT_S + SLACK_S)
    assert code == 1 and "rank 1 of 2, step " in text and "(it is stopped)" in text


@pytest.mark.full
@pytest.mark.usefixtures("started_cold")  # torchrun's ranks are its children
def test_under_torchrun_too_a_rank_that_is_stopped_ends_the_run(task, tmp_path):
    records = records_of(tmp_path, "launched")
    with start(task, tmp_path, "sft", "launched", TORCHRUN) as program:
        wait_for_steps(program, records, 1)
        lead = int(re.search(r"^process (\d+) ", (records / "run.lock").read_text())[1])
        children = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children")
        (rank,) = {int(pid) for pid in children.read_text().split()} - {lead}
        os.kill(rank, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + LIMIT_S + SLACK_S
            while not (records / "exit.json").exists():
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            os.kill(rank, signal.SIGCONT)  # torchrun would wait 30 s before it kills it
        code, text = program.wait(SLACK_S)
    assert code == 1 and re.search(r"rank 1 of 2, step \d+: does not run, .* s ago", text), text
    log = (records / "ranks" / "rank-1.log").read_text()
    assert "initialized the engine" in log, "the messages of a rank with torchrun's output"
    assert "most recent call first" in (records / "ranks" / "rank-0.log").read_text()
