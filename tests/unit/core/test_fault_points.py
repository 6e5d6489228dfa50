"""Fault points: where and how often a fault happens, and what is no fault."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from pentad.core import faults
from pentad.core.errors import UserError


@pytest.fixture
def arm(monkeypatch, tmp_path):
    def arm(text):
        monkeypatch.setattr(faults, "where", faults.Where(rank=2, step=3))
        monkeypatch.setenv(faults.VARIABLE, f"note={tmp_path / 'note'} {text}")
        return tmp_path / "note"

    return arm


def test_a_fault_happens_at_its_place_and_rank_and_step_alone(arm):
    note = arm("at=backward do=full rank=2 step=3")
    faults.hit("forward")
    faults.hit("backward", step=4)
    faults.where.rank = 1
    faults.hit("backward")
    faults.where.rank = 2
    with pytest.raises(OSError, match="No space left"):
        faults.hit("backward")
    told = json.loads(note.with_name("note.0").read_text())
    assert (told["pid"], told["rank"], told["step"]) == (os.getpid(), 2, 3)
    faults.hit("backward")  # once


@pytest.mark.parametrize(("times", "expected"), [(2, 2), (0, 4)])
def test_a_fault_happens_as_often_as_asked_and_0_is_every_time(arm, times, expected):
    arm(f"at=forward do=raise times={times}")
    met = 0
    for _ in range(4):
        try:
            faults.hit("forward")
        except RuntimeError:
            met += 1
    assert met == expected


def test_a_held_process_goes_on_when_it_is_released(arm):
    note = arm("at=load do=hold")
    thread = threading.Thread(target=faults.hit, args=("load",))
    thread.start()
    while not note.with_name("note.0").exists():
        thread.join(0.01)
    assert thread.is_alive()
    note.with_name("note.go").touch()
    thread.join(60)
    assert not thread.is_alive()


def test_gradients_become_no_numbers(arm):
    arm("at=all-reduce do=nan")
    tensors = [torch.ones(2), torch.ones(3)]
    faults.hit("all-reduce", tensors=tensors)
    assert all(tensor.isnan().all() for tensor in tensors)


def test_a_process_kills_itself_once_and_not_its_successor(arm):
    arm("at=commit do=kill")
    code = "from pentad.core.faults import hit; hit('commit'); print('alive')"
    codes = [subprocess.run([sys.executable, "-c", code], check=False).returncode for _ in "12"]
    assert codes == [-signal.SIGKILL, 0]


@pytest.mark.parametrize(
    "text", ["at=nowhere do=kill", "at=forward do=jump", "at=forward", "at=load do=kill rank=x"]
)
def test_what_is_no_fault_is_refused_with_a_sentence(arm, text):
    arm(text)
    with pytest.raises(UserError, match="PENTAD_FAULT = "):
        faults.hit("forward")
    with pytest.raises(UserError, match="PENTAD_FAULT = "):
        faults.check_armed()


def test_a_run_in_which_faults_will_happen_says_so(arm, monkeypatch):
    arm("at=commit do=kill")
    said = faults.check_armed()
    assert "faults will happen: " in said and "at=commit do=kill" in said
    monkeypatch.delenv(faults.VARIABLE)
    assert faults.check_armed() is None and not faults.is_armed()
