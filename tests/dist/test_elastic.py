"""Groups of ranks that shrink and grow: processes that are killed, places that are taken away."""

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
from tables import table

from pentad.cli.slots import run_slots
from pentad.cli.verify_checkpoint import run_verify_checkpoint
from pentad.core.errors import RunError, UserError
from pentad.data.toy import write_byte_model, write_model, write_task
from pentad.runtime.slots import Slots
from pentad.telemetry.recorder import Recorder
from pentad.telemetry.steps import read_lines
from pentad.trainer.sources.examples import run_pretrain, run_sft
from pentad.trainer.sources.rollouts import run_train

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
def after_steps(actions):
    """Runs each action once, when its step is recorded for the first time."""
    plain, left = Recorder.step, dict(actions)

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


def samples_of(records):
    """What stands for the rows of each step."""
    found = [line["rows_digest"] for line in read_lines(records / "steps.jsonl")]
    assert len(set(found)) == len(found), "every step has its own"
    return found


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
    assert samples_of(records) == samples_of(alone.records)
    log = (records / "log.txt").read_text()
    assert (
        "elastic: slot 1 is retired: its process failed once, the last time: was ended by signal 9"
        in log
    )
    assert "elastic: generation 1 has 1 ranks: archon:(attn:d1|ffn:e1) for " in log
    assert "elastic: ranks have returned, the group is re-formed after step 4" in log
    assert "elastic: generation 2 has 2 ranks: archon:(attn:d2|ffn:e2) on all 2 slots" in log
    (recovery,) = read_lines(records / "recoveries.jsonl")
    assert recovery["generation"] == 1 and recovery["slots"] == [0] and recovery["world"] == 1
    assert "was ended by signal 9" in recovery["cause"]
    parts = [recovery[f"{part}_s"] for part in ("detect", "fence", "spawn", "load", "first_step")]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(recovery["total_s"], abs=0.01)
    assert "generation 1: archon:(attn:d1|ffn:e1) on 1 of 2 slots" in capsys.readouterr().out


FAULTS = {
    # A device that raises whenever it computes; memory that the kernel takes back; two lost slots.
    "raise": (2, "at=forward rank=1 step=3 do=raise times=0 note={}/a", (0,)),
    "killed": (2, "at=backward rank=1 step=3 do=kill times=0 note={}/a", (0,)),
    "two slots at one step": (
        3,
        "at=forward rank=2 step=3 do=kill times=0 note={}/a; "
        "at=optimizer rank=1 step=3 do=kill times=0 note={}/b",
        (0,),
    ),
}


@pytest.mark.chaos
@pytest.mark.parametrize("fault", table(list(FAULTS), ["killed", "raise"]))
def test_slots_that_fail_at_one_step_are_retired_and_the_others_finish(
    texts, tmp_path, monkeypatch, fault
):
    torch.set_num_threads(1)
    world, words, left = FAULTS[fault]
    monkeypatch.setenv("PENTAD_FAULT", words.format(tmp_path, tmp_path))
    given = ["train_dataset.max_length=48", "train_dataset.batch_size=6", "total_train_steps=4"]
    more = [*ELASTIC, "saver.mode=sync", f"allocation_mode=archon:d{world}"]
    config, notes = config_of(texts, tmp_path, "pretrain", "met", *given, *more)
    met = run_pretrain(config, notes, device="cpu")
    assert met.num_steps == 4 and not learners()
    slots = Slots(met.records / "slots")
    assert slots.now().used == left and len(slots.away()) == world - len(left)
    log = (met.records / "log.txt").read_text()
    assert "likely cause" not in log
    assert log.count("is retired: its process failed 2 times in a row") == world - len(left)
    assert json.loads((met.records / "exit.json").read_text())["end"] == "complete"


@pytest.mark.chaos
def test_code_that_raises_on_every_slot_ends_the_run_and_gives_slots_back(
    texts, tmp_path, monkeypatch
):
    torch.set_num_threads(1)
    monkeypatch.setenv("PENTAD_FAULT", f"at=forward step=2 do=raise times=0 note={tmp_path}/a")
    given = ["train_dataset.max_length=48", "train_dataset.batch_size=6", "total_train_steps=4"]
    more = [*ELASTIC, "saver.mode=sync", "elastic.slot_failures=1", "allocation_mode=archon:d2"]
    config, notes = config_of(texts, tmp_path, "pretrain", "met", *given, *more)
    sentence = "step 2 failed with the same error on slots 0 and 1, so its data or computation"
    with pytest.raises(RunError, match=sentence):
        run_pretrain(config, notes, device="cpu")
    records = tmp_path / "logs/me/default/met"
    assert not learners() and not Slots(records / "slots").away()
    end = json.loads((records / "exit.json").read_text())
    assert (end["end"], end["saved_step"]) == ("failed", 1)


def test_a_smaller_group_holds_bit_for_bit_what_the_larger_one_saved(
    texts, tmp_path, monkeypatch, capsys
):
    """Four ranks save step 2, three load it with experts cut 3, 3 and 2. No number in the gradient
    has step 3 change nothing: what they save after it is what they held when they had loaded."""
    torch.set_num_threads(1)
    (texts / "eight").mkdir()
    write_byte_model(texts / "eight", num_experts=8)
    given = [
        *(f"actor.path={texts / 'eight'}", "train_dataset.max_length=48"),
        *("train_dataset.batch_size=4", "total_train_steps=3", "recover.freq_steps=1"),
        *("actor.optimizer.lr=1e-3", "recover.keep_last=3", "saver.mode=sync"),
    ]
    faults = (
        f"at=forward rank=3 step=3 do=hold note={tmp_path}/held; "
        f"at=all-reduce rank=0 step=3 do=nan times=0 note={tmp_path}/nan"
    )
    monkeypatch.setenv("PENTAD_FAULT", faults)
    config, notes = config_of(texts, tmp_path, "pretrain", "alone", *given)
    alone = run_pretrain(config, notes, device="cpu")
    layout = "allocation_mode=archon:(attn:d4|ffn:e4)"
    config, notes = config_of(texts, tmp_path, "pretrain", "met", *given, *ELASTIC, layout)
    slots = Slots(tmp_path / "logs/me/default/met/slots")
    with after_steps({2: lambda: slots.drop(1, "its device is gone")}):
        met = run_pretrain(config, notes, device="cpu")
    assert slots.now().layout == "archon:(attn:d3|ffn:e3)" and slots.now().used == (0, 2, 3)

    found = tmp_path / "checkpoints/me/default/met/recover_info"

    def tensors_that_differ(one, other):
        capsys.readouterr()
        run_verify_checkpoint(
            [str(found / f"globalstep{n - 1}") for n in (one, other)], as_json=True
        )
        told = json.loads(capsys.readouterr().out)
        assert told["is_whole"]
        first, second = told["checkpoints"]
        names = [line for line in told["differences"] if line.startswith("default ")]
        return first, second, names

    saved, held, changed = tensors_that_differ(2, 3)
    assert (saved["ranks"], held["ranks"]) == ({"default": 4}, {"default": 3})
    assert all(name.startswith("default rng.3.") for name in changed), "the rank that is no more"
    _, _, trained = tensors_that_differ(1, 2)
    is_moment = ["optimizer.exp_avg" in name for name in trained]
    assert any(is_moment) and not all(is_moment), "weights and moments are what is compared"
    assert len(trained) > held["tensors"]["default"] // 2

    lines, truth = (read_lines(run.records / "steps.jsonl") for run in (met, alone))
    assert [line["update_skipped"] for line in lines] == [False, False, True]
    assert samples_of(met.records) == samples_of(alone.records)
    for mine, theirs in zip(lines, truth, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=CLOSE)


def test_rl_goes_on_with_fewer_ranks_and_grows_again_and_its_sampler_stays(task, tmp_path):
    given = ["total_train_steps=5", "total_train_epochs=2"]
    given += ["allocation_mode=embedded:d1|archon:d2"]
    given += ["saver.mode=sync"]  # every step ends with the checkpoint at which ranks may join
    config, notes = config_of(task, tmp_path, "train", "met", *given, *ELASTIC)
    slots = Slots(tmp_path / "logs/me/default/met/slots")
    seen = []

    def look():
        seen.append((len(learners()), role_processes(os.getpid(), "rollout")))

    def drop():
        look()
        slots.drop(0, "its device is gone")

    def give_back():
        look()
        slots.join(0)

    with after_steps({1: drop, 3: give_back, 5: look}):
        met = run_train(config, notes, device="cpu")
    assert met.num_steps == 5 and not learners()
    assert [world for world, _ in seen] == [2, 1, 2]
    samplers = [pids for _, pids in seen]
    assert samplers[0] and samplers == samplers[:1] * 3
    log = (met.records / "log.txt").read_text()
    assert "elastic: slot 0 is lost: its slot is gone (its device is gone)" in log
    assert "elastic: generation 1 has 1 ranks" in log
    assert "elastic: ranks have returned, the group is re-formed after step " in log
    assert slots.now().used == (0, 1)


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
    assert "1 of 2 slots are available, elastic.min_ranks = 2 (slot 1: gone)" in log

    slots.drop(0, "gone"), slots.drop(1, "gone")
    more = ["elastic.wait_timeout_s=1", "total_train_steps=4"]
    config, notes = config_of(task, tmp_path, "sft", "met", *given, *ELASTIC, *more)
    with pytest.raises(
        RunError, match="0 of 2 slots are available, elastic.min_ranks = 2 .*waited"
    ):
        run_sft(config, notes, device="cpu")
    assert not learners()
    end = json.loads((records / "exit.json").read_text())
    assert (end["end"], end["saved_step"]) == ("failed", 3) and "0 of 2 slots" in end["reason"]


@pytest.mark.parametrize("number", table([signal.SIGTERM, signal.SIGINT], [signal.SIGINT]))
def test_a_run_that_waits_for_ranks_can_be_stopped(task, tmp_path, number):
    """Its end is in exit.json, and meanwhile nobody else has its folder."""
    given = ["total_train_steps=3", "allocation_mode=archon:d2", *ELASTIC]
    config, notes = config_of(task, tmp_path, "sft", "met", *given)
    records = tmp_path / "logs/me/default/met"
    for slot in range(2):
        Slots(records / "slots").drop(slot, "gone")
    refused = []

    def stop_waiting():
        until, log = time.monotonic() + 300, records / "log.txt"
        while not (log.exists() and "elastic: waiting for ranks" in log.read_text()):
            assert time.monotonic() < until
            time.sleep(0.05)
        try:
            run_sft(config, notes, device="cpu")
        except UserError as error:
            refused.append(str(error))
        os.kill(os.getpid(), number)

    waiting = threading.Thread(target=stop_waiting)
    waiting.start()
    sentence = f"stopped by {number.name} before the first step; nothing was trained"
    with pytest.raises(RunError, match=sentence):
        run_sft(config, notes, device="cpu")
    waiting.join()
    assert "another program runs in it" in refused[0]
    end = json.loads((records / "exit.json").read_text())
    assert (end["end"], end["saved_step"]) == ("stopped", 0) and sentence in end["reason"]
