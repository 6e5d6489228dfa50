"""Runs that meet broken rows, failing rewards, full disks and closed screens say so and go on."""

import errno
import json
import signal
import sys

import pytest

from pentad.core.errors import RunError, UserError
from pentad.runtime import signals
from pentad.telemetry.steps import read_lines

REWARDS = """\
def equal(completion): return 1.0
"""


@pytest.fixture
def rewards(tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    return file


def test_a_streamed_run_passes_over_bad_first_rows(lab, task, tmp_path):
    rows = (task / "train.jsonl").read_text().splitlines()
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(["{broken", '{"prompt": "' + "1" * 500 + '"}', *rows[:8]]))
    summary = lab.train(
        f"train_dataset.path={data}", "use_streaming_dataset=true", "train_dataset.shuffle=false"
    )
    funnel = read_lines(summary.records / "steps.jsonl")[-1]["funnel"]
    assert funnel["dropped"]["bad_row"] >= 1 and funnel["dropped"]["too_long"] >= 1


def test_a_batch_that_never_fills_ends_with_the_words_of_the_failure(lab, rewards):
    few = ("train_dataset.batch_size=1", "gconfig.n_samples=2", "rollout.max_retries=0")
    with pytest.raises(RunError, match=r"50 no_signal \(all rewards of such a group are equal\)$"):
        lab.train(f"reward.fn={rewards}:equal", "algorithm.dynamic_filter=true", *few)


def test_rows_without_an_answer_are_found_before_the_run(lab, task, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text((task / "train.jsonl").read_text() + '{"prompt": "12>", "gold": "12"}\n')
    with pytest.raises(UserError, match=r"1 of 65 rows have none, the first at .*data.jsonl:65"):
        lab.train(f"train_dataset.path={data}")
    with pytest.raises(UserError, match=r"valid_dataset.answer_key = answer: .*data.jsonl:65"):
        lab.train(f"valid_dataset.path={data}")
    assert not (lab.fileroot / "logs").exists()


def test_stops_that_cannot_be_are_found_before_the_run(lab):
    with pytest.raises(UserError) as caught:
        lab.train('gconfig.stop=["x", ""]', "gconfig.stop_token_ids=[3, 999]")
    keys = {str(problem).partition(" = ")[0] for problem in caught.value.problems}
    assert keys == {"gconfig.stop", "gconfig.stop_token_ids"}
    assert not (lab.fileroot / "logs").exists()


class ClosedPipe:
    encoding = "utf-8"

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def flush(self):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def isatty(self):
        return False


@pytest.mark.parametrize("stdout", [ClosedPipe(), None])
def test_a_run_needs_no_screen(lab, monkeypatch, stdout):
    monkeypatch.setattr(sys, "stdout", stdout)
    assert len(read_lines(lab.train().records / "steps.jsonl")) == 3


def test_steps_that_are_given_override_epochs(lab, capsys):
    """That is shown only where the epochs were given too."""
    given = ["total_train_epochs=2", "train_dataset.limit=8", "total_train_steps=9"]
    assert lab.train(*given, trial="short").num_steps == 9
    (log,) = lab.fileroot.rglob("short/log.txt")
    said = "total_train_steps = 9: it overrides total_train_epochs = 2, which is 4 steps"
    assert said in log.read_text() and said in capsys.readouterr().err
    assert log.read_text().rstrip().endswith("the run is complete")


def test_bad_input_met_in_the_middle_does_not_claim_that_nothing_was_started(lab, tmp_path, task):
    """Streamed rows are unknown at the start, so a missing answer is met when its turn comes."""
    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()[:8]]
    del rows[7]["answer"]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(RunError, match="prompt 7 has no field 'answer'"):
        lab.train(
            f"train_dataset.path={data}",
            "use_streaming_dataset=true",
            "train_dataset.shuffle=false",
        )


def test_signals_that_the_starter_ignores_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert signal.SIGHUP not in signals.handled_signals()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in signals.handled_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
