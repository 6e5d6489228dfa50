"""A disk without room costs a run nothing that there is room for later; one process writes."""

import subprocess
import time

import pytest
from tables import table

from pentad.checkpoint import writer
from pentad.checkpoint.folders import damage, find_checkpoints
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines
from pentad.trainer.saving import periodic


@pytest.fixture
def small_disk(lab):
    """A file system of its own for checkpoints."""
    place = lab.fileroot / "checkpoints"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def after_steps(monkeypatch, actions):
    """Does something when the record of a step is written, by step."""
    plain = Recorder.step

    def step(self, record, *args):
        actions.get(record.step, lambda: None)()
        return plain(self, record, *args)

    monkeypatch.setattr(Recorder, "step", step)


def fill(ballast):
    """To the last byte: not even a small file can be written."""
    with ballast.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass


def root_of(summary):
    """The folder of the trial's checkpoints."""
    return summary.model.parent.parent


CASES = [("train", "async"), ("sft", "sync"), ("train", "sync"), ("sft", "async")]


@pytest.mark.parametrize(("command", "mode"), table(CASES, CASES[2:]))
def test_a_disk_that_was_full_for_a_moment_costs_that_checkpoint_alone(
    lab, small_disk, monkeypatch, caplog, capsys, command, mode
):
    ballast = small_disk / "ballast"

    def free_if_seen():
        if ballast.exists():
            time.sleep(0.5)  # the writer is a process of its own, and steps are short
        if "could not be saved" in caplog.text:
            ballast.unlink(missing_ok=True)

    after_steps(monkeypatch, {2: lambda: fill(ballast)} | dict.fromkeys(range(3, 12), free_if_seen))
    often = ("recover.freq_steps=1", f"saver.mode={mode}", "total_train_steps=16")
    summary = getattr(lab, command)(*often, "total_train_epochs=2", "trial_name=moment")
    said = capsys.readouterr().err
    words = "could not be saved: [Errno 28] No space left on device: "
    assert f"{words}'{small_disk}/" in said, "a path says which disk"
    infra = [line["infra"] for line in read_lines(summary.records / "steps.jsonl")]
    assert max(one["num_failed_recovers"] for one in infra) >= 1
    assert infra[-1]["num_failed_recovers"] == 0 and infra[-1]["last_recover_step"] >= 12
    found = find_checkpoints(root_of(summary))
    assert found[0].step == 15 and not any(damage(one) for one in found)
    assert summary.model.name.endswith("globalstep15") and summary.model.is_dir()


def test_the_end_of_a_run_waits_for_a_disk_that_is_full_for_a_moment(
    lab, small_disk, monkeypatch, capsys
):
    """Steps after which it could be tried again there are none."""
    ballast = small_disk / "ballast"
    after_steps(monkeypatch, {2: lambda: fill(ballast)})  # no checkpoint may go for room
    plain, waits = periodic.time.sleep, []

    def sleep(seconds):
        if seconds >= 1.0:
            waits.append(seconds)
            ballast.unlink(missing_ok=True)
            return
        plain(seconds)

    monkeypatch.setattr(periodic.time, "sleep", sleep)
    summary = lab.sft("recover.freq_steps=1", "total_train_steps=2", "trial_name=end")
    assert waits and "could not be saved" in capsys.readouterr().err
    assert [found.step for found in find_checkpoints(root_of(summary))][0] == 1
    assert summary.model.is_dir()


@pytest.mark.parametrize("keep_last", [2, 3])
def test_with_room_for_two_the_third_takes_the_place_of_the_older_one(
    lab, small_disk, capsys, keep_last
):
    keep = f"recover.keep_last={keep_last}"
    words = ("recover.freq_steps=1", keep, "saver.mode=sync", "total_train_steps=7")
    first = find_checkpoints(root_of(lab.sft(*words, "trial_name=large")))
    assert len(first) == keep_last
    size = first[0].manifest.num_bytes
    subprocess.run(["find", str(small_disk), "-mindepth", "1", "-delete"], check=True)
    room = int(2.8 * size) + (1 << 16)
    subprocess.run(["mount", "-o", f"remount,size={room}", str(small_disk)], check=True)
    capsys.readouterr()
    summary = lab.sft(*words, "trial_name=small")
    said = capsys.readouterr().err
    assert "the disk is full: the older recovery checkpoint of step 1 is removed for room" in said
    assert said.count("could not be saved") == 1, "it is found out once"
    newest = find_checkpoints(root_of(summary))[0]
    assert newest.step == 6 and not damage(newest)


def test_one_process_writes_for_a_run(lab, monkeypatch):
    started, plain = [], writer.Helper.__init__

    def init(self, *given, **more):
        plain(self, *given, **more)
        started.append(self.child.popen.args)

    monkeypatch.setattr(writer.Helper, "__init__", init)
    often = ("recover.freq_steps=1", "saver.freq_steps=1", "saver.mode=async")
    for run in (lab.train, lab.sft):
        started.clear()
        run(*often, "total_train_steps=3", f"trial_name={run.__name__}")
        assert [words[4] for words in started] == ["pentad.checkpoint.writer:serve"]
