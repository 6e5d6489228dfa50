"""How a run of one process ends: by ctrl-C, by a second one, by a hang; and what is shown."""

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from kill_lab import hold_in_step_2, start_command
from run_lab import values_of
from tables import table

from pentad.core.errors import RunError
from pentad.engine.engine import Engine
from pentad.telemetry.steps import read_lines


class Run:
    def __init__(self, task, root, command, hold_s, *more):
        self.root = root
        words = [
            command,
            f"fileroot={root}",
            "user=me",
            f"actor.path={task / 'model'}",
            "actor.init_from_scratch=true",
            f"train_dataset.path={task / ('sft' if command == 'sft' else 'train')}.jsonl",
            "train_dataset.batch_size=4",
            *more,
        ]
        if command == "train":
            words += ["gconfig.n_samples=4", "gconfig.max_new_tokens=6", "reward.fn=sort_digits"]
        self.log = root / "said"
        self.process = start_command(words, self.log, hold_in_step_2, hold_s)
        while "in step 2" not in self.text:
            assert self.process.is_alive(), self.text
            time.sleep(0.02)

    @property
    def text(self):
        return self.log.read_text() if self.log.exists() else ""

    def interrupt(self):
        os.kill(self.process.pid, signal.SIGINT)

    def end(self, seconds=300):
        self.process.join(seconds)
        code = self.process.exitcode
        self.process.kill(), self.process.join()
        return code, self.text

    @property
    def records(self):
        return self.root / "logs/me/default/trial-0"

    @property
    def exports(self):
        return sorted((self.root / "checkpoints/me/default/trial-0/default").glob("epoch*"))

    @property
    def commits(self):
        return list((self.root / "checkpoints/me/default/trial-0").glob("recover_info/*/COMMIT"))


@pytest.mark.parametrize("command", ["train", "sft"])
def test_ctrl_c_says_where_the_model_is_and_what_to_type_next(task, tmp_path, command):
    run = Run(task, tmp_path, command, 0.5, "total_train_steps=12")
    run.interrupt()
    code, text = run.end()
    (model,) = run.exports
    last = text.strip().splitlines()[-1]
    num_steps = len(read_lines(run.records / "steps.jsonl"))
    assert code == 130, text
    assert f"stopped by SIGINT after {num_steps} of 12 steps; " in last
    assert f"is saved in {model}; started again, the run resumes" in last
    assert model.name.endswith(f"globalstep{num_steps - 1}")
    check_screen(run, text)


def check_screen(run, text):
    """Only our own words, with those that a silent start would lack."""
    log = (run.records / "log.txt").read_text()
    for source in ("Python", "transformers", "dynamo"):
        assert f"noise of {source}" not in text
        assert f"noise of {source}" in log
    assert "making the model ..." in text and "self-test: " in text


@pytest.mark.parametrize(
    ("command", "recovers"),
    table(
        [(c, r) for r in (False, True) for c in ("train", "sft")], [("train", True), ("sft", False)]
    ),
)
def test_a_second_ctrl_c_ends_at_once_in_a_sentence(task, tmp_path, command, recovers):
    often = ["recover.freq_steps=1"] if recovers else []
    run = Run(task, tmp_path, command, 600.0, "saver.freq_steps=1", *often)
    run.interrupt()
    run.interrupt()  # sent to the process and to its group, as `timeout` does: still the first
    while not (run.commits if recovers else run.exports):  # of step 1, written beside the second
        assert run.process.is_alive(), run.text
        time.sleep(0.02)
    time.sleep(1.5)  # the run hears of it
    assert run.process.is_alive()  # it finishes its step
    run.interrupt()
    code, text = run.end()
    assert code == 130, text
    last = text.strip().splitlines()[-1]
    assert "stopped by a second SIGINT in step 2; what was trained since the last save" in last
    if recovers:
        assert "is lost, started again, the run resumes after step 1" in last
    else:
        assert f"the last complete one is {run.exports[0]}" in last
    assert "Traceback" not in text and "the model is saved at the end" not in text


@pytest.mark.parametrize("command", table(["train", "sft"], ["sft"]))
def test_a_learner_that_hangs_ends_the_run(task, tmp_path, command):
    run = Run(task, tmp_path, command, 600.0, "stall_abort_s=12", "saver.freq_steps=1")
    code, text = run.end()
    assert code == 1, text
    last = text.strip().splitlines()[-1]
    assert re.search(r"no progress for \d+ s: ", last)
    doing = {"train": "the update of step 2 is in progress", "sft": "a call of the learner"}
    assert doing[command] in last and "Traceback" not in text
    assert run.exports[0].name.endswith("globalstep0")


def test_a_resumed_run_that_is_stopped_before_its_first_step_says_where_it_stands(
    lab, monkeypatch, request
):
    """Both where a task of the event loop waits and where a call of the learner does."""

    async def stop_soon(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(600)

    end = threading.Event()

    def stop_now(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        end.wait(600)

    request.addfinalizer(end.set)  # a call that does not return is left behind
    words = r"stopped by SIGTERM before the first step; "
    for run in (lab.train, lab.sft):
        name = f"trial_name={run.__name__}"
        with monkeypatch.context() as patch, pytest.raises(RunError, match=words + "nothing was"):
            patch.setattr("pentad.trainer.sampling.selftest.Prober.selftest", stop_soon)
            patch.setattr("pentad.trainer.sources.examples.check_packing", stop_now)
            run(name)
        run(name, "total_train_steps=2")
        stands = "the run has done step 2; started again, it resumes there"
        with monkeypatch.context() as patch, pytest.raises(RunError, match=words + stands):
            patch.setattr("pentad.trainer.sampling.selftest.Prober.selftest", stop_soon)
            patch.setattr("pentad.trainer.sources.examples.check_packing", stop_now)
            run(name, "total_train_steps=3")


BROKEN = """\
import sys
from pentad.engine.engine import Engine

plain = Engine.end_step

def end_step(self):
    if self.num_steps == 2:
        raise ZeroDivisionError("a defect")
    return plain(self)

Engine.end_step = end_step
from pentad.cli.main import main
main()
"""


@pytest.mark.usefixtures("started_warm")
def test_an_exception_that_comes_again_at_its_step_ends_the_run(task, tmp_path):
    words = [
        *("sft", f"fileroot={tmp_path}", "user=me", f"actor.path={task / 'model'}"),
        *("actor.init_from_scratch=true", f"train_dataset.path={task / 'sft.jsonl'}"),
        *("train_dataset.batch_size=4", "recover.freq_steps=1", "recover.retries=5"),
        "saver.mode=sync",
    ]
    done = subprocess.run([sys.executable, "-c", BROKEN, *words], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    starts = json.loads((tmp_path / "logs/me/default/trial-0/manifest.json").read_text())["starts"]
    assert len(starts) == 2
    assert "it is started again after step 2 (try 1 of recover.retries = 5" in done.stderr
    last = "the run failed: ZeroDivisionError: a defect; the try before ended at the same step in"
    assert f"{last} the same way: it is not started again" in done.stderr


@pytest.mark.usefixtures("started_warm")
@pytest.mark.parametrize(("name", "code"), [("EIO", 0), ("EACCES", 1)])
def test_an_error_of_the_operating_system_that_may_pass_is_tried_again(task, tmp_path, name, code):
    """It comes once, in the third step."""
    raised = f'raise OSError(errno.{name}, "refused", "some/file")'
    once = f'(not os.path.exists("{tmp_path}/once") and not open("{tmp_path}/once", "w").close())'
    script = BROKEN.replace('raise ZeroDivisionError("a defect")', raised)
    script = script.replace("self.num_steps == 2:", f"self.num_steps == 2 and {once}:")
    words = [
        *("sft", f"fileroot={tmp_path}", "user=me", f"actor.path={task / 'model'}"),
        *("actor.init_from_scratch=true", f"train_dataset.path={task / 'sft.jsonl'}"),
        *("train_dataset.batch_size=4", "recover.freq_steps=1", "total_train_steps=4"),
        "saver.mode=sync",
    ]
    command = [sys.executable, "-c", f"import errno, os\n{script}", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "the operating system refused: " in done.stderr and "some/file" in done.stderr
    starts = json.loads((tmp_path / "logs/me/default/trial-0/manifest.json").read_text())["starts"]
    assert len(starts) == (2 if name == "EIO" else 1)
    is_again = "it is started again after step 2 (try 1 of recover.retries" in done.stderr
    assert is_again == (name == "EIO")


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_failure_that_passes_changes_no_number(lab, monkeypatch, command):
    """The model is built anew within the process."""
    often = ("recover.freq_steps=1", "total_train_steps=4")
    whole = getattr(lab, command)(*often)
    plain, failed = Engine.end_step, []

    def end_step(self):
        if self.num_steps == 2 and not failed:
            failed.append(self.num_steps)
            raise OSError(errno.EIO, "refused", "some/file")
        return plain(self)

    monkeypatch.setattr(Engine, "end_step", end_step)
    broken = getattr(lab, command)(*often)
    assert values_of(broken) == values_of(whole)
    assert failed == [2]


@pytest.mark.parametrize("command", table(["train", "sft"], ["train"]))
def test_sigterm_ends_the_wait_for_a_checkpoint_that_storage_holds(
    lab, tmp_path, monkeypatch, command
):
    """The model is exported before; a second signal is not needed."""
    note = tmp_path / "fault"
    monkeypatch.setenv("PENTAD_FAULT", f"at=write step=3 do=hold note={note}")
    for module in ("periodic", "recovery"):
        monkeypatch.setattr(f"pentad.trainer.saving.{module}.FAILED_S", 1.0)

    def stop_when_exported():
        while not (note.with_name("fault.0").exists() and list(lab.fileroot.rglob("epoch*step2"))):
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop_when_exported, daemon=True)
    thread.start()
    often = ("recover.freq_steps=1", "saver.mode=async", "total_train_steps=3")
    with pytest.raises(RunError) as caught:
        getattr(lab, command)(*often, "trial_name=held")
    thread.join()
    (model,) = lab.fileroot.rglob("epoch*step2")
    start = "stopped by SIGTERM before the recovery checkpoint of the last step was saved; "
    assert str(caught.value).startswith(f"{start}the model is in {model}; ")
    monkeypatch.delenv("PENTAD_FAULT")
    assert getattr(lab, command)(*often, "trial_name=held").num_steps == 3
