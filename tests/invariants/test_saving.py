"""What was trained is on disk: saved beside training, and saved first whatever fails."""

import asyncio
import errno
import getpass
import os
import shutil
import signal
import subprocess
import threading
import time
from functools import partial

import pytest
import torch
from run_lab import Lab

from pentad.checkpoint import writer
from pentad.checkpoint.export_job import ExportJob
from pentad.checkpoint.writer import Writer
from pentad.core.errors import RunError
from pentad.engine.engine import Engine
from pentad.infer.sampler import EmbeddedSampler
from pentad.runtime.learner_client import DirectCalls
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines
from pentad.trainer.pumps import rollout_pump
from pentad.trainer.saving import periodic, saver
from pentad.trainer.saving.periodic import Frequency
from pentad.weights.hf import HfFolder
from pentad.weights.regions import full_box


@pytest.fixture
def lab(task, tmp_path):
    """Saves as a run does by default: beside training."""
    return Lab(task, tmp_path, saver="auto")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(periodic, "LAST_WAITS_S", (0.0,))


def weights_of(folder):
    reader = HfFolder(folder)
    return {name: reader.read(name, full_box(i.shape)) for name, i in reader.infos.items()}


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def exports_of(lab, trial, role="default"):
    """Steps on disk -> folder."""
    (root,) = lab.fileroot.rglob(f"checkpoints/*/default/{trial}/{role}")
    return {int(f.name.partition("globalstep")[2]): f for f in root.glob("epoch*")}


def log_of(lab, trial):
    (log,) = lab.fileroot.rglob(f"{trial}/log.txt")
    return log.read_text()


def refuse(monkeypatch, is_refused):
    """Writing an export fails with a full disk, where `is_refused(count of attempts)`."""
    plain, count = ExportJob.run, []

    def run(self, disk):
        count.append(self.aside)
        result = plain(self, disk)
        if is_refused(len(count)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return result

    monkeypatch.setattr(ExportJob, "run", run)
    return count


def after_steps(monkeypatch, actions):
    """Does something when the record of a step is written, by step."""
    plain = Recorder.step

    def step(self, record, *args):
        actions.get(record.step, lambda: None)()
        return plain(self, record, *args)

    monkeypatch.setattr(Recorder, "step", step)


@pytest.fixture
def writers(monkeypatch):
    """Those of the runs, as they are made."""
    found, plain = [], Writer.__init__

    def init(self, *given):
        plain(self, *given)
        found.append(self)

    monkeypatch.setattr(Writer, "__init__", init)
    return found


def stop_first_writer(monkeypatch):
    """The writer process stands still before its first job."""
    plain, stopped = writer.Helper.__init__, []

    def init(self, *given, **more):
        plain(self, *given, **more)
        if not stopped:
            stopped.append(self.child.pid)
            self.child.send(signal.SIGSTOP)

    monkeypatch.setattr(writer.Helper, "__init__", init)
    return stopped


def test_exports_written_beside_training_hold_the_weights_of_their_step(lab, monkeypatch):
    lab.train("saver.mode=sync", "saver.freq_steps=1", "total_train_steps=6", trial="sync")
    stopped, seen = stop_first_writer(monkeypatch), []

    def go_on():
        seen.append(list(lab.fileroot.rglob("beside/default/epoch*")))
        os.kill(stopped[0], signal.SIGCONT)

    after_steps(monkeypatch, {5: go_on})  # two updates after the copy was taken
    lab.train("saver.freq_steps=3", "total_train_steps=6", trial="beside")
    assert seen == [[]], "the export was there before its writer went on"
    whole, beside = exports_of(lab, "sync"), exports_of(lab, "beside")
    assert beside.keys() == {2, 5}
    for step, folder in beside.items():
        assert bytes_of(folder) == bytes_of(whole[step])


def test_records_say_how_exports_were_written(lab):
    for mode, is_beside in (("sync", False), ("auto", True), ("async", True)):
        summary = lab.train(f"saver.mode={mode}", "saver.freq_steps=1", trial=mode)
        infra = [line["infra"] for line in read_lines(summary.records / "steps.jsonl")]
        assert (infra[-1]["async_ckpt_commit_ms"] is not None) == is_beside
        assert infra[-1]["last_saved_step"] == (3 if not is_beside else 2)  # one is under way
        start = (summary.records / "manifest.json").read_text()
        assert f'"saver_mode": "{"async" if is_beside else "sync"}"' in start


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_exports_come_every_so_many_epochs(lab, mode):
    every = ("saver.freq_epochs=2", "train_dataset.batch_size=32", f"saver.mode={mode}")
    lab.sft(*every, "total_train_epochs=5", "trial_name=epochs")  # of two steps
    assert exports_of(lab, "epochs").keys() == {3, 7, 9}, "and at the end"


def test_exports_come_every_so_many_seconds_also_across_a_restart(lab, monkeypatch):
    now = [0.0]

    def pass_time(self, record, *args, plain=Recorder.step):
        now[0] += 10
        return plain(self, record, *args)

    monkeypatch.setattr(Recorder, "step", pass_time)
    monkeypatch.setattr(
        "pentad.trainer.context.Frequency", partial(Frequency, clock=lambda: now[0])
    )
    every = ("saver.freq_secs=25", "saver.mode=sync", "trial_name=seconds")
    lab.sft(*every, "total_train_steps=5")
    assert exports_of(lab, "seconds").keys() == {3, 4}, "after 30 s and at the end"
    lab.sft(*every, "total_train_steps=8")
    assert exports_of(lab, "seconds").keys() == {3, 4, 6, 7}, "30 s after the first"


def test_a_host_without_room_for_a_copy_saves_while_training_waits(lab, monkeypatch, capsys):
    monkeypatch.setattr("pentad.trainer.context.host_memory", lambda: (1000, 1000))
    summary = lab.train("saver.freq_steps=1", "total_train_steps=2")
    assert "saver.mode = auto: training waits while the model is saved" in capsys.readouterr().err
    infra = read_lines(summary.records / "steps.jsonl")[-1]["infra"]
    assert infra["async_ckpt_commit_ms"] is None and infra["last_saved_step"] == 2


@pytest.fixture
def small_disk(lab):
    """A file system of its own for checkpoints, with room for three exports."""
    place = lab.fileroot / "checkpoints"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1300k", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip("a file system can be mounted by root only")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def remount(place, mode):
    subprocess.run(["mount", "-o", f"remount,{mode}", str(place)], check=True)


REASONS = {
    "full": "No space left on device",
    "read-only": "Read-only file system",
    "no folder": "checkpoints/",  # named; the words depend on who makes the folders
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_disk_that_refuses_is_said_at_once_and_saving_is_tried_again(
    lab, small_disk, monkeypatch, capsys, mode, reason
):
    ballast = small_disk / "ballast"
    before, after = {
        "full": (lambda: ballast.write_bytes(bytes(1_200_000)), ballast.unlink),
        "read-only": (lambda: remount(small_disk, "ro"), lambda: remount(small_disk, "rw")),
        "no folder": (
            lambda: (small_disk / getpass.getuser()).touch(),
            small_disk.joinpath(getpass.getuser()).unlink,
        ),
    }[reason]
    after_steps(monkeypatch, {1: before, 5: after})
    steps = ("saver.freq_steps=2", "total_train_steps=8")
    summary = lab.train(*steps, f"saver.mode={mode}", trial=mode)
    said = capsys.readouterr().err
    assert "globalstep1 could not be saved: " in said and REASONS[reason] in said
    assert "training continues, saving is tried again after step" in said
    infra = [line["infra"] for line in read_lines(summary.records / "steps.jsonl")]
    assert infra[3]["num_failed_saves"] and infra[3]["last_saved_step"] is None
    assert infra[7]["num_failed_saves"] == 0
    found = exports_of(lab, mode)
    assert 7 in found and 1 not in found and all(map(weights_of, found.values()))
    assert not list(small_disk.rglob(".epoch*"))


def test_a_writer_that_is_killed_costs_one_export_and_is_replaced(
    lab, monkeypatch, capsys, writers
):
    stopped = stop_first_writer(monkeypatch)
    after_steps(monkeypatch, {2: lambda: os.kill(stopped[0], signal.SIGKILL)})
    steps = ("saver.freq_steps=2", "total_train_steps=6")
    summary = lab.train(*steps, trial="killed")
    said = capsys.readouterr().err
    assert (
        "globalstep1 could not be saved: the process that writes checkpoints was ended by signal"
        in said
    )
    infra = [line["infra"] for line in read_lines(summary.records / "steps.jsonl")]
    assert max(one["num_failed_saves"] for one in infra) == 1
    assert infra[-1]["num_failed_saves"] == 0
    found = exports_of(lab, "killed")
    assert 1 not in found and 5 in found and all(map(weights_of, found.values()))
    assert not list(summary.model.parent.glob(".*"))
    assert all(writer.pid is None for writer in writers), "a run leaves no process"


def test_a_writer_that_hangs_is_ended_with_a_sentence_and_costs_one_export(
    lab, monkeypatch, capsys
):
    stop_first_writer(monkeypatch)
    summary = lab.train("saver.freq_steps=2", "total_train_steps=4", "stall_abort_s=8")
    said = capsys.readouterr().err
    assert "globalstep1 could not be saved: the process that writes checkpoints was ended" in said
    assert "it wrote nothing for stall_abort_s = 8 s" in said
    assert weights_of(summary.model)


def test_a_disk_that_stays_full_ends_the_run_with_the_last_good_export(lab, monkeypatch):
    refuse(monkeypatch, lambda count: count > 1)
    with pytest.raises(
        RunError, match=r"globalstep5 could not be saved: .*No space left"
    ) as caught:
        lab.train("saver.freq_steps=2", "total_train_steps=6", "saver.mode=sync", trial="full")
    (whole,) = exports_of(lab, "full").values()
    assert whole.name.endswith("globalstep1") and weights_of(whole)
    assert f"the last complete one is {whole}" in str(caught.value)
    (steps,) = lab.fileroot.rglob("full/steps.jsonl")
    assert len(read_lines(steps)) == 6
    assert log_of(lab, "full").rstrip().endswith(str(caught.value))


def test_too_little_room_is_said_before_the_end(lab, monkeypatch, capsys):
    usage = shutil.disk_usage(lab.fileroot)
    rest = [usage._replace(free=10**12)] * 2 + [usage._replace(free=10)] * 9

    def shrinking(path):
        return rest.pop(0)

    monkeypatch.setattr(saver.shutil, "disk_usage", shrinking)
    lab.train("total_train_steps=3")
    said = capsys.readouterr().err
    assert said.count("as it is, the model cannot be saved") == 1


def test_on_a_disk_that_is_really_full_one_export_stays_whole(lab, small_disk, capsys):
    words = ("saver.freq_steps=1", "total_train_steps=6")
    with pytest.raises(RunError, match=r"globalstep5 could not be saved: .*No space left"):
        lab.train(*words, trial="tiny")
    folders = list(small_disk.rglob("epoch*"))
    assert folders and all(weights_of(folder) for folder in folders)
    assert not list(small_disk.rglob(".epoch*"))
    assert "could not be saved" in capsys.readouterr().err


REWARD = """\
import os, pathlib
calls = pathlib.Path(__file__).with_suffix(".calls")
def fails(completion):
    with calls.open("a") as file:
        file.write("x")
    if calls.stat().st_size > {after}:
        {action}
    return float(len(completion))
"""


@pytest.mark.parametrize(
    ("action", "said"),
    [("raise ValueError('no such judge')", "no such judge"), ("os._exit(3)", "dropped so far")],
)
def test_what_was_trained_before_a_failing_reward_is_exported(
    lab, tmp_path, capsys, monkeypatch, action, said
):
    monkeypatch.setattr(rollout_pump, "MAX_DRAWS_PER_SLOT", 4)  # each starts a worker anew
    file = tmp_path / "reward.py"
    file.write_text(REWARD.format(after=32, action=action))  # 16 samples a step
    few = ("rollout.max_retries=0", "reward.num_workers=1", "total_train_steps=9")
    with pytest.raises(RunError, match=said):
        lab.train(f"reward.fn={file}:fails", *few, trial="lost")
    (saved,) = exports_of(lab, "lost").values()
    num_steps = len(read_lines(next(lab.fileroot.rglob("lost/steps.jsonl"))))
    assert num_steps and saved.name.endswith(f"globalstep{num_steps - 1}") and weights_of(saved)
    assert f"({num_steps} steps) is saved in {saved}" in capsys.readouterr().err


def test_what_was_trained_before_a_sampler_that_hangs_is_exported(lab, monkeypatch):
    plain = EmbeddedSampler.generate

    async def generate(self, *args):
        if self.version == 2:
            await asyncio.Event().wait()
        return await plain(self, *args)

    monkeypatch.setattr(EmbeddedSampler, "generate", generate)
    with pytest.raises(
        RunError, match=r"no progress for \d+ s: rollout waits for running groups: 4 must finish"
    ):
        retries = "recover.retries=0"
        lab.train("total_train_steps=4", "stall_abort_s=2", retries, trial="hung")
    assert exports_of(lab, "hung").keys() == {1}


def test_what_was_trained_before_a_frozen_event_loop_is_exported(lab, monkeypatch):
    """Stopped and continued from outside, say: the exception comes where the loop waits."""
    plain = Recorder.step

    def step(self, record, *args):
        if record.step == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
            time.sleep(0.5)
        return plain(self, record, *args)

    monkeypatch.setattr(Recorder, "step", step)
    with pytest.raises(RunError, match="nothing else could run for"):
        lab.train("total_train_steps=4", trial="frozen")
    assert exports_of(lab, "frozen").keys() == {1}


def test_what_was_trained_before_any_exception_is_exported(lab, monkeypatch):
    def broken(self, *args):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("pentad.trainer.records.StepRecorder._watch_target", broken)
    for name, run in (("train", lab.train), ("sft", lab.sft)):
        with pytest.raises(ZeroDivisionError):
            run(f"trial_name=broken-{name}", "recover.retries=0")
        assert exports_of(lab, f"broken-{name}").keys() == {0}


@pytest.mark.parametrize("command", ["train", "sft"])
def test_nothing_is_tried_where_a_rank_is_gone_and_one_sentence_says_so(
    lab, monkeypatch, capsys, command
):
    plain = DirectCalls.call_all

    def call(self, method, **arguments):
        if (method, arguments) in (("begin", {"batch": 2}), ("step", {"step": 2})):
            self.is_broken = True
            raise RuntimeError("Connection closed by peer")
        return plain(self, method, **arguments)

    monkeypatch.setattr(DirectCalls, "call_all", call)
    often = ("recover.freq_steps=1", "recover.retries=0", "saver.mode=sync", "trial_name=torn")
    with pytest.raises(RuntimeError, match="closed by peer"):
        getattr(lab, command)(*often)
    said = capsys.readouterr().err
    words = "the ranks do not answer any more, so nothing is saved; started again, the run resumes"
    assert said.count(f"after the failure: {words} after step 2") == 1
    assert said.count("after the failure") == 1 and "could not be saved" not in said
    assert not list(lab.fileroot.rglob("epoch*"))


def test_weights_of_no_step_are_not_exported(lab, monkeypatch, capsys):
    plain = Engine._move

    def stumble(self, *args):
        if self.num_steps == 2:
            raise RunError("out of memory in the optimizer step")
        plain(self, *args)

    monkeypatch.setattr(Engine, "_move", stumble)
    with pytest.raises(RunError, match="out of memory in the optimizer step"):
        lab.train("saver.freq_steps=1", trial="torn")
    assert exports_of(lab, "torn").keys() == {0, 1}
    with pytest.raises(RunError, match="out of memory in the optimizer step"):
        lab.train(trial="nothing")
    assert "the weights are invalid" in capsys.readouterr().err


def test_a_run_whose_folder_is_deleted_saves_its_model_and_ends(lab, monkeypatch):
    plain = Recorder.step

    def step(self, record, *args):
        if record.step == 2:
            shutil.rmtree(self.folder.path)
        return plain(self, record, *args)

    monkeypatch.setattr(Recorder, "step", step)
    for name, run in (("train", lab.train), ("sft", lab.sft)):
        with pytest.raises(RunError, match="was deleted or replaced while the run was active"):
            run(f"trial_name=gone-{name}", "total_train_steps=4")
        assert exports_of(lab, f"gone-{name}").keys() == {1}


def test_a_run_started_anew_leaves_the_models_of_the_former_one_as_they_were(lab):
    first = weights_of(lab.train("total_train_steps=2", "seed=1", trial="again").model)
    second = lab.train("total_train_steps=2", "seed=2", trial="again", fresh=True)
    (kept,) = lab.fileroot.rglob("again/earlier/001/default/epoch0epochstep1globalstep1")
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights_of(kept).items())
    assert [folder for folder in second.model.parent.glob("epoch*")] == [second.model]


def test_an_export_that_is_gone_is_written_again_by_a_run_that_goes_on(lab):
    """Removed by hand, or left on a machine that was lost."""
    words = ("trial_name=gone", "total_train_steps=2", "saver.freq_steps=1", "saver.mode=sync")
    first = lab.sft(*words)
    before = bytes_of(first.model)
    shutil.rmtree(first.model)
    again = lab.sft(*words)
    assert again.model == first.model and bytes_of(again.model) == before


def test_a_streamed_dataset_that_is_rewritten_ends_the_run(lab, task, tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    rows = (task / "train.jsonl").read_text()
    data.write_text(rows)
    plain = Recorder.step

    def step(self, record, *args):
        if record.step == 1:
            data.touch()  # the same rows: nothing is wrong
        elif record.step == 2:
            data.write_text(rows.replace("answer", "anser "))
        return plain(self, record, *args)

    monkeypatch.setattr(Recorder, "step", step)
    streamed = (f"train_dataset.path={data}", "use_streaming_dataset=true")
    with pytest.raises(RunError, match="data.jsonl was changed while the run reads from it"):
        lab.train(*streamed, "total_train_steps=6", trial="rewritten")
    (last,) = exports_of(lab, "rewritten")
    assert last in (1, 2)  # rows of the step after it may have been read before
