"""Samplers in processes of their own: the numbers of one process, and what a death costs."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from kill_lab import start_command
from role_processes import role_processes
from run_lab import steps_of, values_of
from test_rl_runs import assert_same_weights

from pentad.config.topology import Topology
from pentad.core import scratch
from pentad.core.errors import RunError
from pentad.core.layout import parse_allocation
from pentad.models.registry import create_model, dims_of, save_model
from pentad.runtime import roles
from pentad.runtime.local_roles import LocalRuntime
from pentad.samplers.replica import Replica, State
from pentad.sync.lent import FILE
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines

SEPARATE = "scheduler.processes=separate"
STALL_S = 8.0


def without_evals(summary):
    """A record names the evaluations that ended before it was written, which is a matter of time
    where they run beside training."""
    return [{**json.loads(text), "evals": None} for text in values_of(summary)]


def evals_of(summary):
    lines = read_lines(summary.records / "evals.jsonl")
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["colocate", "hybrid", "async"])
def test_one_process_and_several_give_the_same_weights(lab, task, mode):
    given = [f"mode={mode}", "total_train_steps=6", f"valid_dataset.path={task / 'valid.jsonl'}"]
    one = lab.train(*given, "scheduler.processes=one")
    several = lab.train(*given, SEPARATE)
    assert_same_weights(one, several)
    assert without_evals(one) == without_evals(several)
    assert evals_of(one) == evals_of(several) != []
    assert len(steps_of(several)) == 6
    assert (several.records / "servers" / "rollout-0.log").exists()
    assert not (one.records / "servers").exists()


def children(role="rollout"):
    return role_processes(os.getpid(), role)


@pytest.fixture
def shared(tmp_path_factory, monkeypatch):
    """In the place of shared memory, which other runs use too."""
    folder = tmp_path_factory.mktemp("shared")
    monkeypatch.setattr(scratch, "SHARED_MEMORY", folder)
    return folder


@contextmanager
def meddling(*moments, role="rollout"):
    """Sends a signal to a process of the role a moment after a run has recorded that step, 0 being
    its start. The run does not go on before this was noticed."""
    done, sent, plain = threading.Event(), [], Recorder.step
    recorded = {step: threading.Event() for step, *_ in moments}
    noticed = {step: threading.Event() for step in recorded}

    def record_step(self, record, *args):
        line = plain(self, record, *args)
        if record.step in recorded:
            recorded[record.step].set()
            noticed[record.step].wait(60)
        return line

    def meddle():
        for step, delay_s, number in moments:
            while step and not recorded[step].wait(0.02):
                if done.is_set():
                    return
            noticed[step].set()
            while not done.wait(delay_s):
                if found := children(role):
                    os.kill(found[0], number)
                    sent.append(number)
                    break

    thread = threading.Thread(target=meddle)
    thread.start()
    Recorder.step = record_step
    try:
        yield sent
    finally:
        Recorder.step = plain
        done.set()
        thread.join()


@pytest.mark.slow
def test_a_lost_replica_is_started_again_and_the_run_ends_the_same(lab, shared, monkeypatch):
    """Before the first step, in the middle of a wave, and by a hang."""
    monkeypatch.setattr(roles, "PATIENCE_S", 8.0)
    given = ["total_train_steps=6", "gconfig.max_new_tokens=24"]
    whole = lab.train(*given)
    moments = (0, 0.1, signal.SIGKILL), (1, 0.02, signal.SIGKILL), (3, 0.02, signal.SIGSTOP)
    with meddling(*moments) as sent:
        met = lab.train(*given, SEPARATE, trial="met")
    log = (met.records / "log.txt").read_text()
    assert len(sent) == 3 and log.count("rollout-0 is lost: ") == 3
    assert "it sent nothing for 8 s" in log and "SIGKILL" in log
    assert len(re.findall(r"rollout-0 serves again \d+\.\d s after it was lost", log)) >= 2
    assert_same_weights(whole, met)
    assert values_of(whole) == values_of(met)
    assert not children() and not children("learner") and not list(shared.iterdir())


@pytest.mark.slow
def test_two_replicas_share_the_groups_and_one_may_die(lab, shared):
    given = ["mode=hybrid", "max_staleness=1", "total_train_steps=6", "gconfig.max_new_tokens=24"]
    with meddling((1, 0.1, signal.SIGKILL)) as sent:
        met = lab.train(*given, "allocation_mode=embedded:d2+archon:d1", trial="met")
    funnel = steps_of(met)[-1]["funnel"]
    assert len(sent) == 1 and len(steps_of(met)) == 6
    assert funnel["trained"] == 6 * 4 and not funnel["dropped"]
    logs = sorted(path.name for path in (met.records / "servers").iterdir())
    assert logs == ["rollout-0.log", "rollout-1.log"]
    assert not children() and not children("learner") and not list(shared.iterdir())


@pytest.mark.slow
def test_a_replica_that_never_comes_back_ends_the_run_with_the_cause(lab, shared, monkeypatch):
    broken = threading.Event()
    start = LocalRuntime.start

    async def fail(self, spec):
        if spec.generation and spec.name.startswith("rollout"):
            broken.set()
            spec = replace(spec, environment={"PYTHONHASHSEED": "nonsense"})
        return await start(self, spec)

    monkeypatch.setattr(LocalRuntime, "start", fail)
    moment = (1, 0.02, signal.SIGKILL)
    with meddling(moment), pytest.raises(RunError) as caught:
        lab.train("total_train_steps=6", "rollout.restarts=2", SEPARATE, trial="met")
    text = str(caught.value)
    assert "rollout-0 was restarted 2 times without an answer in between" in text
    assert "rollout.restarts = 2" in text and "PYTHONHASHSEED" in text
    assert broken.is_set() and not children() and not children("learner")
    assert not list(shared.iterdir())


@pytest.mark.slow
def test_a_replica_sleeps_while_the_trainer_has_its_turn(lab, shared, monkeypatch):
    """One that dies asleep is started when it is woken, with the newest weights."""
    slept = []
    sleep = Replica.sleep

    async def sleep_and_die(self):
        await sleep(self)
        slept.append(self.version)
        if len(slept) == 2:
            os.kill(children()[0], signal.SIGKILL)
            while self.state is not State.LOST or children():
                await asyncio.sleep(0.01)

    monkeypatch.setattr(Replica, "sleep", sleep_and_die)
    plain = lab.train("total_train_steps=4")
    met = lab.train("total_train_steps=4", "offload_rollout=true", SEPARATE, trial="met")
    assert slept == [0, 1, 2, 3]
    log = (met.records / "log.txt").read_text()
    assert re.search(r"rollout-0 serves again .* with weights of version [12]\b", log)
    assert_same_weights(plain, met)
    assert not children() and not children("learner") and not list(shared.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "moments"),
    [
        ("colocate", [(1, 0.02, signal.SIGKILL), (3, 0.1, signal.SIGKILL)]),
        ("hybrid", [(2, 0.05, signal.SIGKILL)]),
    ],
)
def test_a_lost_learner_is_started_again_while_the_sampler_stays(lab, shared, mode, moments):
    given = [f"mode={mode}", "total_train_steps=6", "recover.freq_steps=1", "saver.mode=sync"]
    whole = lab.train(*given)
    samplers_seen = set()
    with meddling(*moments, role="learner") as sent:
        stop = threading.Event()

        def look():
            while not stop.wait(0.05):
                samplers_seen.update(children())

        looking = threading.Thread(target=look)
        looking.start()
        met = lab.train(*given, SEPARATE, trial="met")
        stop.set(), looking.join()
    log = (met.records / "log.txt").read_text()
    assert len(sent) == len(moments) and len(samplers_seen) == 1
    assert log.count("it is started again after step ") == len(moments)
    assert "rank 0 of 1, step " in log and "was ended by signal 9 (SIGKILL)" in log
    assert_same_weights(whole, met)
    assert values_of(whole) == values_of(met)
    assert not children() and not children("learner") and not list(shared.iterdir())


@pytest.fixture(scope="module")
def frozen(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen") / "model"
    save_model(create_model(dims_of(task / "model"), seed=7), folder, source_folder=task / "model")
    return folder


def mapped_base(pid):
    """The file of frozen weights that a process maps, and the KiB that it has copied by writing."""
    maps = Path(f"/proc/{pid}/smaps").read_text()
    found = re.findall(rf" (\d+) +/memfd:{FILE} .*?^Anonymous: +(\d+)", maps, re.M | re.S)
    assert len(found) < 2
    return found[0] if found else None


@pytest.mark.slow
def test_a_sampler_uses_the_learners_frozen_weights_and_either_may_die(
    lab, frozen, shared, monkeypatch
):
    """The run with a copy in the sampler, in which nothing dies, gives the same numbers."""
    given = ["mode=hybrid", "actor.init_from_scratch=false", "actor.lora.rank=4", SEPARATE]
    given += ["total_train_steps=6", "recover.freq_steps=1", "saver.mode=sync"]
    given += [f"actor.path={frozen}", "actor.optimizer.lr=1e-2"]
    seen, stop, plain = {"rollout": {}, "learner": {}}, threading.Event(), Topology.shares_base

    def look():
        while not stop.wait(0.02):
            for role, files in seen.items():
                for pid in children(role):
                    with suppress(OSError):
                        files[pid] = mapped_base(pid) or files.get(pid)

    looking = threading.Thread(target=look)
    monkeypatch.setattr(Topology, "shares_base", False)
    whole = lab.train(*given)
    monkeypatch.setattr(Topology, "shares_base", plain)
    looking.start()
    try:
        with (
            meddling((1, 0.05, signal.SIGKILL)) as one,
            meddling((3, 0.05, signal.SIGKILL), role="learner") as other,
        ):
            met = lab.train(*given, trial="met")
    finally:
        stop.set(), looking.join()
    log = (met.records / "log.txt").read_text()
    assert len(one) == len(other) == 1
    assert "rollout-0 serves again" in log and "it is started again after step " in log
    trained, other = (one.model / "adapter_model.safetensors" for one in (whole, met))
    assert trained.read_bytes() == other.read_bytes() and values_of(whole) == values_of(met)
    lent, borrowed = seen["learner"].values(), seen["rollout"].values()
    assert len(lent) == 2 and len(borrowed) == 3, "one sampler died, one ended with its learner"
    files = [file for file, _ in borrowed]
    assert files[0] == files[1] != files[2] and set(files) == {file for file, _ in lent}
    assert {changed for _, changed in borrowed} == {"0"}, "they map it, and copy nothing"
    assert not children() and not children("learner") and not list(shared.iterdir())


def be_impatient():
    """In the scheduler: silence of a sampler is a loss after as long as a stall is."""
    roles.PATIENCE_S = STALL_S


@pytest.mark.slow
def test_a_scheduler_that_is_stopped_goes_on_where_it_was(task, tmp_path):
    steps, log = tmp_path / "logs/me/default/stopped/steps.jsonl", tmp_path / "said"
    words = [
        *("train", f"fileroot={tmp_path}", "user=me", "trial_name=stopped", "mode=async"),
        *(f"actor.path={task / 'model'}", "actor.init_from_scratch=true", "max_staleness=1"),
        *(f"train_dataset.path={task / 'train.jsonl'}", "train_dataset.batch_size=4"),
        *("gconfig.n_samples=4", "gconfig.max_new_tokens=6", "reward.fn=sort_digits"),
        *("total_train_steps=30", "total_train_epochs=100", "scheduler.processes=separate"),
        *("recover.retries=0", "rollout.restarts=0", f"stall_abort_s={STALL_S}"),
    ]
    run = start_command(words, log, be_impatient)
    try:
        while len(read_lines(steps)) < 2:
            assert run.is_alive(), log.read_text()
            time.sleep(0.02)
        os.kill(run.pid, signal.SIGSTOP)
        time.sleep(1.1 * STALL_S)  # the clock of a stall runs on
        assert len(read_lines(steps)) < 30, "it was stopped too late"
        os.kill(run.pid, signal.SIGCONT)
        run.join(300)
        assert run.exitcode == 0, log.read_text()[-3000:]
    finally:
        run.kill(), run.join()
    assert len(read_lines(steps)) == 30
    said = (steps.parent / "log.txt").read_text()
    assert " is lost" not in said and "stalled" not in said


@pytest.mark.parametrize("processes", ["one", "separate"])
def test_the_allocation_is_parsed_once_a_run(lab, processes):
    """Every question about the placement is asked of one topology. A second text is that of the
    resume: the config a run began with is compared with its own."""
    parse_allocation.cache_clear()
    lab.train("total_train_steps=1", f"scheduler.processes={processes}")
    assert parse_allocation.cache_info().misses <= 2
