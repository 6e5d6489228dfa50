"""Groups of ranks that shrink and grow: real processes that are killed, places that are taken away."""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from role_processes import role_processes
from run_cases import config_of

from pentad.cli.slots import run_slots
from pentad.core.errors import RunError
from pentad.data.toy import write_byte_model, write_model, write_task
from pentad.runtime.slots import Slots
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines
from pentad.trainer.assemble import run_train
from pentad.trainer.sft import run_pretrain, run_sft

pytestmark = pytest.mark.dist

CLOSE = 1e-5
"""Ranks add up in another order: float32 sums differ in the last digits, over six steps."""
ELASTIC = ("elastic.enabled=true", "elastic.standbys=false", "recover.freq_steps=1")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_byte_model(folder / "model", num_experts=4)
    lines = [f"{n} is followed by {n + 1}; " * (1 + n % 4) for n in range(30)]
    told = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (folder / "pretrain.jsonl").write_text(told)
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_model(folder / "model")
    write_task(folder, seed=5, num_train=16, num_sft=16, num_valid=2)
    return folder


@contextmanager
def after_steps(deeds):
    """Does each deed once, when its step is recorded for the first time."""
    plain, left = Recorder.step, dict(deeds)

    def step(self, record, *args):
        line = plain(self, record, *args)
        if record.step in left:
            left.pop(record.step)()
        return line

    Recorder.step = step
    try:
        yield left
    finally:
        Recorder.step = plain


def learners():
    return role_processes(os.getpid(), "learner")


def values_of(records):
    return [[line["loss"], line["grad_norm"]] for line in read_lines(records / "steps.jsonl")]


def test_pretraining_goes_on_with_fewer_ranks_and_grows_again(texts, tmp_path, capsys):
    """Experts are cut anew twice; every step has the batch and the loss of one process."""
    torch.set_num_threads(1)
    given = [
        *("train_dataset.max_length=48", "train_dataset.batch_size=4", "total_train_steps=6"),
        "actor.optimizer.lr=1e-3",
    ]
    config, notes = config_of(texts, tmp_path, "pretrain", "alone", *given)
    alone = run_pretrain(config, notes, device="cpu")
    layout = "allocation_mode=archon:(attn:d2|ffn:e2)"
    more = [*ELASTIC, "saver.mode=sync", "elastic.slot_failures=1", layout]
    config, notes = config_of(texts, tmp_path, "pretrain", "met", *given, *more)
    records = tmp_path / "logs/me/default/met"
    worlds = []

    def kill():
        worlds.append(len(learners()))
        os.kill(learners()[1], signal.SIGKILL)

    def give_back():
        worlds.append(len(learners()))
        run_slots(str(records), [], [1])

    with after_steps({2: kill, 4: give_back, 5: lambda: worlds.append(len(learners()))}) as left:
        met = run_pretrain(config, notes, device="cpu")
    assert not left and worlds == [2, 1, 2]
    assert met.num_steps == 6 and not learners()
    for mine, truth in zip(values_of(records), values_of(alone.records), strict=True):
        assert mine == pytest.approx(truth, rel=CLOSE, abs=1e-6)
    log = (records / "log.txt").read_text()
    assert "elastic: slot 1 is retired: its process failed 1 times in a row" in log
    assert "elastic: generation 1 has 1 ranks: archon:(attn:d1|ffn:e1) for " in log
    assert "elastic: ranks have returned, the group is formed anew after step 4" in log
    assert "elastic: generation 2 has 2 ranks: archon:(attn:d2|ffn:e2) on all 2 slots" in log
    (recovery,) = read_lines(records / "recoveries.jsonl")
    assert recovery["generation"] == 1 and recovery["slots"] == [0] and recovery["world"] == 1
    assert "was ended by signal 9" in recovery["cause"]
    parts = [recovery[f"{part}_s"] for part in ("detect", "fence", "spawn", "load", "first_step")]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(recovery["total_s"], abs=0.01)
    assert "generation 1: archon:(attn:d1|ffn:e1) on 1 of 2 slots" in capsys.readouterr().out


def test_rl_goes_on_with_fewer_ranks_and_its_sampler_stays(task, tmp_path):
    given = ["total_train_steps=4", "allocation_mode=embedded:d1|archon:d2"]
    config, notes = config_of(task, tmp_path, "train", "met", *given, *ELASTIC)
    slots = Slots(tmp_path / "logs/me/default/met/slots")
    seen = []

    def look():
        seen.append((len(learners()), role_processes(os.getpid(), "rollout")))

    def drop():
        look()
        slots.drop(0, "its device is gone")

    with after_steps({1: drop, 3: look}):
        met = run_train(config, notes, device="cpu")
    assert met.num_steps == 4 and not learners()
    (before, sampler), (after, same) = seen
    assert (before, after) == (2, 1) and sampler == same and sampler
    log = (met.records / "log.txt").read_text()
    assert "elastic: slot 0 is lost: its place is gone (its device is gone)" in log
    assert slots.now().used == (1,)


def test_too_few_ranks_are_waited_for_and_not_for_ever(task, tmp_path):
    given = ["total_train_steps=3", "allocation_mode=archon:d2", "elastic.min_ranks=2"]
    config, notes = config_of(task, tmp_path, "sft", "met", *given, *ELASTIC)
    records = tmp_path / "logs/me/default/met"
    slots = Slots(records / "slots")

    def return_later():
        until = time.monotonic() + 300
        while "elastic: waiting for ranks" not in (records / "log.txt").read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
        slots.join(1)

    waiting = threading.Thread(target=return_later)

    def drop():
        slots.drop(1, "gone")
        waiting.start()

    with after_steps({1: drop}):
        met = run_sft(config, notes, device="cpu")
    waiting.join()
    assert met.num_steps == 3
    log = (records / "log.txt").read_text()
    assert "1 of 2 slots are there, elastic.min_ranks = 2 (slot 1: gone)" in log

    slots.drop(0, "gone"), slots.drop(1, "gone")
    more = ["elastic.wait_timeout_s=1", "total_train_steps=4"]
    config, notes = config_of(task, tmp_path, "sft", "met", *given, *ELASTIC, *more)
    with pytest.raises(RunError, match="0 of 2 slots are there, elastic.min_ranks = 2 .*waited"):
        run_sft(config, notes, device="cpu")
    assert not learners()
