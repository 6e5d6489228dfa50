"""Runs of `pentad train` and `sft` as processes that can be killed, forked from one that has
imported everything: most of a short run would be the import of torch."""

import base64
import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import warm_start

from pentad.telemetry.record import comparable
from pentad.telemetry.steps import read_lines


class Started:
    """A process of a command."""

    def __init__(self, popen):
        self.popen = popen
        self.pid, self.kill = popen.pid, popen.kill

    def is_alive(self):
        return self.exitcode is None

    @property
    def exitcode(self):
        return self.popen.poll()

    def join(self, seconds=None):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(seconds)


def start_command(words, log, change=None, *given):
    """A process that runs the command line, after `change(*given)`, with its output in a file."""
    job = base64.b64encode(pickle.dumps((words, change, given))).decode()
    paths = os.pathsep.join(filter(None, sys.path))
    with Path(log).open("ab") as output:
        return Started(
            subprocess.Popen(
                [sys.executable, "-m", "kill_lab", job],
                env=os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that a signal to its group reaches no other process
            )
        )


def run_command(job):
    """In the child."""
    from pentad.cli.main import main

    words, change, given = pickle.loads(base64.b64decode(job))
    if change is not None:
        change(*given)
    sys.argv[:] = ["pentad", *words]
    main()


def hold_after(step, go):
    """The run waits when it has recorded this step, so that nothing hurries who watches it."""
    from pentad.telemetry.recorder import Recorder

    plain = Recorder.step

    def held(self, record, *args):
        line = plain(self, record, *args)
        while record.step == step and not go.exists():
            time.sleep(0.02)
        return line

    Recorder.step = held


def hold_in_step_2(seconds):
    """The learner of a run hangs there, after some noise of libraries."""
    from pentad.engine.engine import Engine
    from pentad.runtime import signals

    plain = Engine.end_step

    def end_step(self):
        result = plain(self)
        warnings.warn("noise of Python", stacklevel=1)
        logging.getLogger("transformers.models").warning("noise of transformers")
        logging.getLogger("torch._dynamo").warning("noise of dynamo")
        if self.num_steps == 2:
            print("in step 2", flush=True)
            time.sleep(seconds)
        return result

    Engine.end_step = end_step
    signals.SAME_S = 0.7  # a busy machine may put that much between two that are sent together


class KillLab:
    """One command under several names."""

    def __init__(self, task: Path, fileroot: Path, command: str, *words: str):
        self.fileroot = fileroot
        self.words = [
            command,
            *(f"fileroot={fileroot}", "user=me", "recover.freq_steps=1"),
            *(f"actor.path={task / 'model'}", "actor.init_from_scratch=true"),
            *("actor.gradient_checkpointing=false", "actor.optimizer.lr=1e-3"),
            *words,
        ]
        warm_start.get_forker()  # no run is timed together with the imports

    def start(self, trial, *more, hold=0):
        """`hold`: the step after which it waits for `release`, or for its end."""
        words = [*self.words, f"trial_name={trial}", *more]
        change = (hold_after, hold, self.go(trial)) if hold else ()
        return start_command(words, self.log(trial), *change)

    def go(self, trial):
        return self.fileroot / f"{trial}.go"

    def release(self, trial):
        self.go(trial).touch()

    def kill(self, process):
        """Returns when also what it had started has ended, a writer of checkpoints for one."""
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill(), process.join()
        _, alive = psutil.wait_procs(below, timeout=120)
        assert not alive, alive

    def run(self, trial, *more, code=0):
        """To its end; how long that took."""
        begun = time.monotonic()
        process = self.start(trial, *more)
        process.join()
        assert process.exitcode == code, self.log(trial).read_text()
        return time.monotonic() - begun

    def run_killed(self, trial, delays, *more, number=signal.SIGKILL):
        """Killed after each of these seconds, then to its end; how many kills it met alive."""
        kills = 0
        for delay in delays:
            process = self.start(trial, *more)
            process.join(delay)
            if process.exitcode is None:
                os.kill(process.pid, number)
                kills += 1
            process.join()
        self.run(trial, *more)
        return kills

    def log(self, trial):
        return self.fileroot / f"{trial}.log"

    def records(self, trial):
        return self.fileroot / "logs" / "me" / "default" / trial

    def checkpoints(self, trial):
        return self.fileroot / "checkpoints" / "me" / "default" / trial

    def steps(self, trial):
        """What equal runs have in common of their records."""
        return [comparable(line) for line in read_lines(self.records(trial) / "steps.jsonl")]

    def evals(self, trial):
        lines = read_lines(self.records(trial) / "evals.jsonl")
        return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]

    def gids(self, trial):
        """Step -> the groups that it trained, if all samples are recorded."""
        found = {}
        for line in read_lines(self.records(trial) / "samples.jsonl"):
            found.setdefault(line["step"], set()).add(line["gid"])
        return found

    def weights(self, trial, step):
        (folder,) = (self.checkpoints(trial) / "default").glob(f"epoch*globalstep{step - 1}")
        return (folder / "model.safetensors").read_bytes()

    def wait_for_steps(self, trial, num, process):
        while len(read_lines(self.records(trial) / "steps.jsonl")) < num:
            assert process.is_alive(), self.log(trial).read_text()
            time.sleep(0.02)


if __name__ == "__main__":
    run_command(sys.argv[1])
