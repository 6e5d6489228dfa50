"""`pentad verify-checkpoint`: every byte, what it holds, and how two differ."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_saves import QuickDisk, commit_job, save
from typer.testing import CliRunner

from pentad.checkpoint import shards
from pentad.checkpoint.folders import state_folder
from pentad.checkpoint.job import run_job
from pentad.checkpoint.shards import StateSaver
from pentad.cli.main import app


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints" / "me" / "gsm8k" / "trial0"
    for step in (1, 2):
        facts: dict[str, Any] = {"allocation_mode": "d2", "config": {"lr": 1e-4 * step}}
        save(lambda job: run_job(job, QuickDisk()), root, step, ("default", "critic"), facts=facts)
    return root


def verify(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify-checkpoint", *map(str, words)])
    return result.exit_code, result.output


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_whole_trial(root: Path):
    code, text = verify(root)
    assert code == 0
    lines = [line.split() for line in text.splitlines() if line]
    assert lines[0] == ["step", "saved", "every", "byte", "part", "ranks", "tensors", "size"]
    for at, number in ((1, "2"), (4, "1")):
        assert [lines[at][0], *lines[at][2:6]] == [number, "whole", "critic", "2", "2"]
        assert lines[at + 1][:3] == ["default", "2", "2"]
        assert lines[at + 2][:3] == ["recover_info,", "ready", "groups"]
    assert text.endswith("\nallocation_mode: d2\n")


@pytest.mark.parametrize(
    "place",
    [
        "recover_info/globalstep1",
        "default/recover_checkpoint/globalstep1",
        "critic/recover_checkpoint/globalstep1/",
    ],
)
def test_one_step_by_any_of_its_folders(root: Path, place: str):
    code, text = verify(root / place, "--json")
    (row,) = json.loads(text)["checkpoints"]
    assert (code, row["step"], row["damage"]) == (0, 1, [])


@pytest.mark.parametrize("place", ["recover_info", "default/recover_checkpoint"])
def test_the_folders_of_all_steps(root: Path, place: str):
    code, text = verify(root / place, "--json")
    assert (code, [row["step"] for row in json.loads(text)["checkpoints"]]) == (0, [2, 1])


def test_a_damaged_one_is_named_and_the_exit_code_says_so(root: Path):
    spoil(root / "critic/recover_checkpoint/globalstep2/__1_0.distcp")
    code, text = verify(root)
    assert code == 1
    assert "1 damaged" in text and "whole" in text
    assert "critic/recover_checkpoint/globalstep2/__1_0.distcp: piece model.b (bytes 408" in text
    assert verify(root / "recover_info/globalstep1")[0] == 0


def test_a_garbled_mark_fails_when_it_is_asked_for(root: Path):
    spoil(root / "recover_info/globalstep2/COMMIT")
    code, text = verify(root / "recover_info/globalstep2")
    assert code == 1
    assert "COMMIT: does not hold the sha256" in text
    code, text = verify(root)  # the other one is whole, but not all is well here
    assert code == 1
    assert "COMMIT: does not hold the sha256" in text


def test_one_that_was_never_committed(root: Path):
    (root / "recover_info/globalstep2/COMMIT").unlink()
    code, text = verify(root / "recover_info/globalstep2")
    assert (code, "was never committed" in text) == (1, True)
    code, text = verify(root)  # an interrupted save is no damage
    assert (code, "was never committed" in text) == (0, True)


def test_places_that_hold_none(root: Path, tmp_path: Path):
    code, text = verify(tmp_path / "nowhere")
    assert (code, "no such folder" in text) == (2, True)
    code, text = verify(tmp_path / "checkpoints")
    assert code == 2
    assert "".join(text.split()).count(str(root)) == 1


def test_two_differ_by_step_key_and_tensor(root: Path):
    code, text = verify(root / "recover_info/globalstep1", root / "recover_info/globalstep2")
    assert code == 0
    for line in (
        "step: 1, 2",
        "config.lr: 0.0001, 0.0002",
        "step_info.json global_step: 1, 2",
        "critic model.a: differs",
        "default model.b: differs",
    ):
        assert f"  {line}\n" in text


def test_two_that_hold_the_same(root: Path, tmp_path: Path):
    copy = shutil.copytree(root, tmp_path / "copy")
    code, text = verify(root, copy)
    assert (code, "The two are equal." in text) == (0, True)


def save_state(root: Path, tensors: dict[str, torch.Tensor]) -> None:
    staged = StateSaver().save(tensors, root, state_folder("default", 0), is_async=False)
    run_job(commit_job(root, 0, [staged.result(240)]))


def test_tensors_that_are_cut_differently_are_read_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tensors = {"model.same": torch.arange(999.0), "model.other": torch.ones(700)}
    save_state(tmp_path / "a", tensors)
    monkeypatch.setattr(shards, "PIECE_BYTES", 512)
    save_state(tmp_path / "b", {**tensors, "model.other": 2 * torch.ones(700)})
    code, text = verify(tmp_path / "a", tmp_path / "b", "--json")
    assert code == 0
    found = [line for line in json.loads(text)["differences"] if line.startswith("default")]
    assert found == ["default model.other: differs"]
