"""The recorder writes everything where it belongs, and no failure of its own reaches the run."""

import errno
import logging
import os
import threading
import warnings as python_warnings
from pathlib import Path

import numpy as np
import pytest

from pentad.core.errors import RunError, UserError
from pentad.core.types import Group, Prompt, Sample
from pentad.rl.health import find_alarms
from pentad.telemetry.log import ScreenHandler, log_to
from pentad.telemetry.record import Rl, StepRecord
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.runfolder import open_run_folder
from pentad.telemetry.steps import read_lines


@pytest.fixture
def folder(tmp_path):
    opened = open_run_folder(tmp_path / "run", config={}, config_yaml="", config_digest="d", seed=1)
    yield opened
    opened.close()


def make_groups(rewards=(0.0, 1.0)):
    samples = [
        Sample(
            ids=np.array([5, 7]),
            mask=np.array([False, True]),
            rollout_logprobs=np.zeros(2, np.float32),
            versions=np.array([-1, 0]),
            finish="stop",
            text=f"says {reward}",
            reward=reward,
        )
        for reward in rewards
    ]
    return [Group(Prompt(3, (5,), {}, "asks"), samples)]


class Spy:
    """A screen that notes what it is shown."""

    def __init__(self, fails_on=None):
        self.seen = []
        self.fails_on = fails_on

    def _note(self, name, value):
        self.seen.append((name, value))
        if name == self.fails_on:
            raise RuntimeError("terminal gone")

    def step(self, record):
        self._note("step", record["step"])

    def resume(self, records, evals):
        told = [[r["step"] for r in records], [e["version"] for e in evals]]
        self._note("resume", told)

    def samples(self, lines):
        self._note("samples", [line["pick"] for line in lines])

    def evaluation(self, record):
        self._note("evaluation", record["version"])

    def close(self):
        self._note("close", None)


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_steps_samples_and_evaluations_go_to_their_files_and_the_screen(folder):
    screen = Spy()
    recorder = Recorder(folder, screen, samples_per_step=2)
    recorder.evaluation({"version": 0, "accuracy": 0.25, "reward_mean": float("nan")})
    line = recorder.step(StepRecord(step=1, loss=0.5), make_groups())
    recorder.step(StepRecord(step=2, loss=0.25))
    recorder.close()
    steps = read_lines(folder.file("steps.jsonl"))
    assert [(s["step"], s["loss"]) for s in steps] == [(1, 0.5), (2, 0.25)]
    assert steps[0] == line
    assert [e["version"] for e in steps[0]["evals"]] == [0] and steps[1]["evals"] is None
    (evaluated,) = read_lines(folder.file("evals.jsonl"))
    assert evaluated["accuracy"] == 0.25 and evaluated["nonfinite"] == {"reward_mean": "nan"}
    samples = read_lines(folder.file("samples.jsonl"))
    assert [(s["step"], s["pick"], s["text"]) for s in samples] == [
        (1, "best", "says 1.0"),
        (1, "worst", "says 0.0"),
    ]
    assert screen.seen == [
        ("evaluation", 0),
        ("samples", ["best", "worst"]),
        ("step", 1),
        ("samples", []),
        ("step", 2),
        ("close", None),
    ]


def test_a_full_disk_costs_records_not_the_run(folder, monkeypatch, caplog):
    recorder = Recorder(folder)
    recorder.step(StepRecord(step=1, loss=0.5), make_groups())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for step in (2, 3):
        recorder.step(StepRecord(step=step, loss=0.5), make_groups())
    monkeypatch.undo()
    recorder.step(StepRecord(step=4, loss=0.5))
    recorder.close()
    assert [r["step"] for r in read_lines(folder.file("steps.jsonl"))] == [1, 4]
    said = [text for text in warnings(caplog) if text.startswith("steps.jsonl")]
    assert said == [
        "steps.jsonl: OSError: [Errno 28] No space left on device; training continues",
        "steps.jsonl failed 2 times in this run",
    ]


def test_a_screen_that_fails_is_left_alone_afterwards(folder, caplog):
    screen = Spy(fails_on="step")
    recorder = Recorder(folder, screen)
    for step in (1, 2):
        recorder.step(StepRecord(step=step))
    recorder.close()
    assert [name for name, _ in screen.seen] == ["samples", "step"]
    assert [text for text in warnings(caplog) if "screen" in text] == [
        "the screen: RuntimeError: terminal gone; training continues",
        "the screen failed 1 times in this run",
    ]
    assert len(read_lines(folder.file("steps.jsonl"))) == 2


def test_evaluations_of_another_thread_are_all_kept_once(folder):
    recorder = Recorder(folder, Spy())
    versions = range(200)
    other = threading.Thread(target=lambda: [recorder.evaluation({"version": v}) for v in versions])
    other.start()
    for step in range(1, 101):
        recorder.step(StepRecord(step=step))
    other.join()
    recorder.step(StepRecord(step=101))
    recorder.close()
    steps = read_lines(folder.file("steps.jsonl"))
    seen = [e["version"] for step in steps for e in step["evals"] or ()]
    assert seen == list(versions)
    assert [e["version"] for e in read_lines(folder.file("evals.jsonl"))] == list(versions)
    assert recorder.failures == {}


def test_alarms_are_raised_once_in_a_while(folder, caplog):
    recorder = Recorder(folder, find_alarms=find_alarms)
    for step in range(1, 70):
        rl = Rl(reward_mean=0.5, reward_std=0.3, truncated_share=0.6 + step / 1000)
        recorder.step(StepRecord(step=step, rl=rl))
    said = warnings(caplog)
    assert [text.split(":")[0] for text in said] == ["step 5", "step 55"]
    assert "of answers are cut at the length limit" in said[0]


def test_an_alarm_finder_that_fails_is_no_alarm(folder, caplog):
    def broken(recent, first):
        raise ZeroDivisionError("0/0")

    recorder = Recorder(folder, find_alarms=broken)
    assert recorder.step(StepRecord(step=1))["step"] == 1
    assert warnings(caplog) == ["alarms: ZeroDivisionError: 0/0; training continues"]


def test_a_warning_that_repeats_itself_is_shown_once_with_a_count(tmp_path, capsys):
    path = tmp_path / "log.txt"
    ours = logging.getLogger("pentad.rollout")
    with log_to(path):
        for gid in range(300):
            ours.warning("group %d dropped: %s", gid, "NameError")
        ours.warning("another matter")
    assert capsys.readouterr().err.splitlines() == [
        "warning: group 0 dropped: NameError",
        "warning: another matter",
        "warning: 299 more like: group 0 dropped: NameError",
    ]
    assert path.read_text().count("dropped: NameError") == 300, "the file has them all"


def test_of_a_long_warning_the_beginning_is_shown_again_at_the_end(capsys, tmp_path):
    with log_to(tmp_path / "log.txt"):
        for gid in range(3):
            logging.getLogger("pentad.rollout").warning("group %d dropped: %s", gid, "why " * 60)
    first, last = capsys.readouterr().err.splitlines()
    assert len(first) > 200 and len(last) < 120
    assert last.startswith("warning: 2 more like: group 0 dropped: why why") and "..." in last


def test_a_warning_that_comes_again_later_is_shown_with_what_was_hidden(capsys):
    now = [0.0]
    screen = ScreenHandler(clock=lambda: now[0])
    for at in (0, 10, 59, 61, 122):
        now[0] = at
        screen.handle(logging.makeLogRecord({"msg": f"slow at {at}", "levelno": logging.WARNING}))
    screen.close()
    assert [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "slow at 0",
        "slow at 61 (2 like it before)",
        "slow at 122",
    ]


def test_messages_go_to_the_file_and_warnings_to_the_screen_as_well(tmp_path, capsys):
    path = tmp_path / "log.txt"
    for _ in range(2):
        with log_to(path):
            logging.getLogger("pentad.trainer").info("step %d done", 3)
            logging.getLogger("pentad.trainer").debug("too much detail")
            logging.getLogger("someone.else").info("chatter")
            logging.getLogger("someone.else").warning("their trouble")
            python_warnings.warn("old way", stacklevel=1)
    logging.getLogger("pentad.trainer").error("after the run")
    shown = capsys.readouterr().err
    assert shown.count("warning: their trouble\n") == 2
    assert "step 3 done" not in shown and "old way" not in shown
    lines = path.read_text()
    assert lines.count("INFO    pentad.trainer: step 3 done") == 2, "the next start appends"
    assert "WARNING someone.else: their trouble" in lines and "old way" in lines
    assert "chatter" not in lines and "detail" not in lines and "after the run" not in lines


class Drawn:
    """A sink on no thread."""

    def __init__(self, can_redraw):
        self.can_redraw, self.seen = can_redraw, []

    def resume(self, step):
        self.seen.append(("resume", step))

    def write(self, step, values):
        self.seen.append((step, *sorted(values)))

    def write_samples(self, step, lines):
        self.seen.append((step, "samples"))

    def close(self):
        pass


def test_a_resumed_run_goes_on_without_gaps_and_doubles(folder):
    first = Recorder(folder, samples_per_step=1)
    first.evaluation({"version": 0, "accuracy": 0.1})
    for step in range(1, 6):
        first.step(StepRecord(step=step, loss=step / 8), make_groups())
        if step in (3, 5):
            first.evaluation({"version": step, "accuracy": 0.2})
    first.close()
    folder.add_start({})
    screen, redraws, appends = Spy(), Drawn(True), Drawn(False)
    again = Recorder(folder, screen, [redraws, appends], samples_per_step=1)
    assert again.resume(3) == 2
    assert again.evaluated() == {0, 3}
    for step in (4, 5, 6):
        again.step(StepRecord(step=step, loss=step / 8), make_groups())
    again.evaluation({"version": 5, "accuracy": 0.3})
    again.evaluation({"version": 6, "accuracy": 0.3})
    again.sync()
    again.close()
    steps = read_lines(folder.file("steps.jsonl"))
    assert [(s["step"], s["generation"]) for s in steps] == [
        *((step, 0) for step in (1, 2, 3)),
        *((step, 1) for step in (4, 5, 6)),
    ]
    assert [[e["version"] for e in s["evals"] or ()] for s in steps] == [[0], [], [], [3], [], []]
    assert [s["step"] for s in read_lines(folder.file("samples.jsonl"))] == [1, 2, 3, 4, 5, 6]
    assert [e["version"] for e in read_lines(folder.file("evals.jsonl"))] == [0, 3, 5, 6]
    every = read_lines(folder.file("evals.jsonl"), superseded=True)
    assert [e["version"] for e in every if e.get("superseded")] == [5]
    assert screen.seen[0] == ("resume", [[1, 2, 3], [0, 3]])
    assert redraws.seen[0] == ("resume", 3)
    assert [entry[0] for entry in redraws.seen[1:]] == [4, 4, 5, 5, 6, 6, 5, 6]
    assert [entry[0] for entry in appends.seen[1:]] == [6, 6, 6], "what is there is not sent again"


def test_alarms_of_a_resumed_run_know_what_came_before(folder, caplog):
    first = Recorder(folder, find_alarms=find_alarms)
    first.step(StepRecord(step=1, rl=Rl(entropy=2.0)))
    first.close()
    again = Recorder(folder, find_alarms=find_alarms)
    again.resume(1)
    for step in range(2, 8):
        again.step(StepRecord(step=step, rl=Rl(entropy=0.01)))
    alarmed = again.state()
    again.close()
    said = [text for text in warnings(caplog) if "entropy has fallen from 2 to 0.01" in text]
    assert len(said) == 1
    last = Recorder(folder, find_alarms=find_alarms)
    last.resume(7)
    last.restore(alarmed)
    last.step(StepRecord(step=8, rl=Rl(entropy=0.01)))
    last.close()
    assert [text for text in warnings(caplog) if "entropy" in text] == said, (
        "not said again so soon"
    )


def test_a_log_on_a_full_disk_is_one_line_and_hides_no_failure(capsys):
    """26.4, 26.21: the cause of the end stays the last line, without a traceback."""
    with pytest.raises(RunError, match="the cause"), log_to(Path("/dev/full")):
        for n in range(3):
            logging.getLogger("pentad.test").info("message %d", n)
        raise RunError("the cause")
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "/dev/full cannot be written" in shown


def test_a_start_that_ends_at_a_bad_record_closes_no_file_of_others(folder):
    folder.file("steps.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    recorder = Recorder(folder)
    with pytest.raises(UserError, match="steps.jsonl: a record lacks fields of a run"):
        recorder.resume(2)
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
    recorder.close()
    for other in others:
        os.close(other)
