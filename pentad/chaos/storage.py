"""Scenarios of storage: dead writers, full disks and stalled ones, damaged checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pentad.chaos.broken_run import ChaosRun, require
from pentad.chaos.invariants import newest_state
from pentad.chaos.scenarios import RECOVERED, WENT_ON, Scenario, again, says
from pentad.checkpoint.folders import list_steps

BESIDE = ("saver.mode=async", "recover.freq_steps=2")
"""Saves are written by a process beside training; the first is that of step 2."""


def fail_save(trial: ChaosRun, at: str, do: str, cause: str) -> None:
    step = 2
    what = {"kill": "SIGKILL of the writer", "full": "a full disk"}[do]
    trial.done = f"{what} in the {at} of step {step}"
    fault = trial.fault(at, do, step=step)
    trial.start_until(fault, words=BESIDE)
    trial.wait_end()
    says(trial, f"the recovery checkpoint of step {step} could not be saved: ", cause)
    require(len({line["generation"] for line in trial.lines}) == 1, "the run was started again")


def stall(trial: ChaosRun) -> None:
    trial.done = "the storage stands still in the save of step 2, until step 4 is trained"
    fault = trial.fault("write", "hold", step=2)
    trial.start_until(fault, words=BESIDE)
    trial.wait_steps(4)
    trial.struck_at = None
    trial.release(fault)
    trial.wait_end()


def kill_in_save(trial: ChaosRun, at: str) -> None:
    """Saves are written by the training process itself."""
    step = trial.some_step()
    trial.done = f"SIGKILL of the run in the {at} of step {step}"
    fault = trial.fault(at, "hold", step=step)
    trial.start_until(fault)
    again(trial)
    says(trial, f"resumed after step {step - 1} from")


def spoil(trial: ChaosRun, what: str, change: Callable[[ChaosRun], Path], sentence: str) -> None:
    step = max(3, trial.some_step())  # two are committed
    trial.done = f"SIGKILL of the run in step {step}; the newest checkpoint {what}"
    fault = trial.fault("forward", "hold", step=step)
    trial.start_until(fault)
    trial.kill_run()
    change(trial)
    trial.start()
    trial.wait_end()
    says(trial, sentence, f"resumed after step {step - 2} from")


def cut(trial: ChaosRun) -> Path:
    path = newest_state(trial)
    path.write_bytes(path.read_bytes()[:-7])
    return path


def flip(trial: ChaosRun) -> Path:
    path = newest_state(trial)
    data = bytearray(path.read_bytes())
    data[trial.draw.randrange(len(data))] ^= 1
    path.write_bytes(data)
    return path


def garble(trial: ChaosRun) -> Path:
    step = list_steps(trial.checkpoints)[0]
    path = trial.checkpoints / f"recover_info/globalstep{step}/COMMIT"
    path.write_bytes(path.read_bytes()[:-5])
    return path


def lose(trial: ChaosRun) -> Path:
    step = list_steps(trial.checkpoints)[0]
    path = trial.checkpoints / f"recover_info/globalstep{step}"
    shutil.rmtree(path)
    shutil.rmtree(trial.checkpoints / f"default/recover_checkpoint/globalstep{step}")
    return path


def spoiled(name: str, what: str, change: Callable[[ChaosRun], Path], sentence: str) -> Scenario:
    act = partial(spoil, what=what, change=change, sentence=sentence)
    return Scenario(name, act, RECOVERED, "any", is_soaked=True)


OF_STORAGE = (
    *(
        Scenario(name, partial(fail_save, at=at, do=do, cause=cause), WENT_ON, "any")
        for name, at, do, cause in (
            ("kill-writer", "write", "kill", "ended (by signal 9)"),
            ("disk-full", "write", "full", "No space left on device"),
            ("disk-full-in-commit", "commit", "full", "No space left on device"),
        )
    ),
    Scenario("storage-stall", stall, WENT_ON, "any"),
    *(
        Scenario(name, partial(kill_in_save, at=at), RECOVERED, "any", is_soaked=True)
        for name, at in (("kill-in-write", "write"), ("kill-before-commit", "commit"))
    ),
    spoiled("torn-checkpoint", "is cut short", cut, "the checkpoint is set aside as"),
    spoiled("flipped-bit", "has a flipped bit", flip, "does not have the digest"),
    spoiled("garbled-commit", "has a broken COMMIT", garble, "the checkpoint is set aside as"),
    spoiled("lost-checkpoint", "is gone", lose, "recorded since is done again"),
)
