"""An error of the storage, or a manifest of a later version, is no damage: what reads a checkpoint
says so, and nothing of it is touched."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_saves import QuickDisk, commit_job, save
from read_faults import ERRORS, failing, tree
from typer.testing import CliRunner

from pentad.checkpoint.folders import (
    Damaged,
    Manifest,
    Unreadable,
    _canonical,
    _digest,
    commit_marker,
    damage,
    find_checkpoints,
    read_checkpoint,
    read_file,
    state_folder,
)
from pentad.checkpoint.job import run_job
from pentad.checkpoint.quarantine import list_aside, put_back, quarantine, sweep_uncommitted
from pentad.checkpoint.restore import restore
from pentad.checkpoint.shards import StateSaver
from pentad.cli.main import app
from pentad.core.errors import RunError
from pentad.core.files import Disk
from pentad.core.lock import FolderLock

INFO = "recover_info/globalstep2"
STATE = "default/recover_checkpoint/globalstep2"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save(lambda job: run_job(job, QuickDisk()), root, step)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints" / "me" / "x" / "trial"))


MARKS = (f"{INFO}/COMMIT", f"{INFO}/manifest.json")
PLACES = (*MARKS, "recover_info", "default/recover_checkpoint", ".")
READERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "find": (find_checkpoints, (*MARKS, "recover_info")),
    "sweep": (sweep_uncommitted, PLACES),
    "read": (lambda root: read_checkpoint(root, 2), MARKS),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize(
    ("reader", "place"), [(reader, at) for reader, (_, all_) in READERS.items() for at in all_]
)
def test_every_mark_and_folder_times_every_error(root: Path, reader: str, place: str, name: str):
    (root / INFO / ".x.receipt").write_text("what a sweep would remove")
    (root / "recover_info/globalstep1/COMMIT").write_bytes(b"what a sweep would set aside\n")
    before = tree(root)
    with (
        failing(name, root / place) as tried,
        pytest.raises(Unreadable, match=r"cannot be read .*no checkpoint was changed") as found,
    ):
        READERS[reader][0](root)
    assert tried and str(root / place) in str(found.value)
    assert tree(root) == before


LINKS = ("recover_info", INFO, f"{INFO}/COMMIT", f"{INFO}/manifest.json", f"{INFO}/step_info.json")


@pytest.mark.parametrize("reader", ["find", "sweep", "read"])
@pytest.mark.parametrize(
    "place", [*LINKS, "default", "default/recover_checkpoint", STATE, f"{STATE}/__RANK_0.distcp"]
)
def test_a_link_to_a_disk_that_is_not_there_is_no_damage(root: Path, reader: str, place: str):
    elsewhere = root.parent / "disk"
    at = root / place
    if not at.exists():  # its name has the rank
        at = next(at.parent.glob("*.distcp"), None) or next(at.parent.iterdir())
    at.rename(elsewhere)
    at.symlink_to(elsewhere)
    whole = [one.step for one in find_checkpoints(root)]
    elsewhere.rename(away := root.parent / "away")
    before = tree(root)

    def read() -> None:
        READERS[reader][0](root)
        for one in find_checkpoints(root):
            for path in one.manifest.files:
                read_file(one, path)

    with pytest.raises(Unreadable, match="a link to nowhere.*no checkpoint was changed"):
        read()
    assert tree(root) == before
    away.rename(elsewhere)
    assert [one.step for one in find_checkpoints(root)] == whole == [2, 1]
    read()


def test_a_link_to_a_model_that_was_removed_is_nothing_to_a_start(root: Path):
    (root / "latest").symlink_to("default/epoch0epochstep0globalstep0")
    (root / "default/best").symlink_to("epoch0epochstep0globalstep0")
    sweep_uncommitted(root)
    assert [one.step for one in find_checkpoints(root)] == [2, 1]


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("path", [f"{INFO}/step_info.json", f"{STATE}/.metadata"])
def test_every_small_file_times_every_error(root: Path, path: str, name: str):
    found = read_checkpoint(root, 2)
    assert found is not None
    with failing(name, root / path), pytest.raises(Unreadable, match="cannot be read"):
        read_file(found, path)


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("file", [".metadata", "__RANK_0.distcp"])
def test_tensors_times_every_error(tmp_path: Path, file: str, name: str):
    tensors = {"model.a": torch.arange(64.0)}
    folder = state_folder("default", 0)
    staged = StateSaver().save(tensors, tmp_path, folder, is_async=False)
    run_job(commit_job(tmp_path, 0, [staged.result(240)]))
    found = read_checkpoint(tmp_path, 0)
    assert found is not None
    (path,) = [tmp_path / at for at in found.manifest.files if at.endswith(file.lstrip("_"))] or [
        tmp_path / next(at for at in found.manifest.files if at.endswith(".distcp"))
    ]
    with failing(name, path), pytest.raises(Unreadable, match=path.name):
        restore({"model.a": torch.zeros(64)}, found, folder)
    restore(back := {"model.a": torch.zeros(64)}, found, folder)
    assert torch.equal(back["model.a"], tensors["model.a"])


def later_format(root: Path, step: int) -> None:
    """The manifest of a step as a later version may write it, with a COMMIT that fits."""
    info = root / f"recover_info/globalstep{step}"
    body: dict[str, Any] = json.loads((info / "manifest.json").read_bytes())
    del body["digest"]
    body = {**body, "format": 2, "files": {"new": "shape"}}
    data = _canonical({**body, "digest": _digest(body)})
    (info / "manifest.json").write_bytes(data)
    (info / "COMMIT").write_bytes(commit_marker(data))


@pytest.mark.parametrize("reader", READERS)
def test_a_manifest_of_a_later_version_is_left_as_it_is(root: Path, reader: str):
    later_format(root, 2)
    before = tree(root)
    with pytest.raises(Unreadable, match=r"format is 2, and this version reads 1; .*version of"):
        READERS[reader][0](root)
    assert tree(root) == before


@pytest.mark.parametrize("found", [0, -1, "2", None, 1.5])
def test_a_format_that_no_version_has_is_damage(found: object):
    body: dict[str, Any] = {"format": found, "step": 2, "facts": {}, "files": {}}
    with pytest.raises(ValueError, match="format"):
        Manifest.from_bytes(_canonical({**body, "digest": _digest(body)}))


def test_a_commit_stands_where_older_ones_cannot_be_read_to_be_removed(root: Path):
    job = commit_job(root, 3, [], keep_last=1)
    with failing("EIO", root / "recover_info/globalstep1/COMMIT"):
        (note,) = run_job(job)["notes"]
    assert "older checkpoints were not removed" in note and "Input/output error" in note
    assert [one.step for one in find_checkpoints(root, pytest.fail)] == [3, 2, 1]


# Put back


def verify(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify-checkpoint", *map(str, words)])
    return result.exit_code, " ".join(result.output.split())


def set_aside(root: Path, step: int = 2) -> Path:
    found = read_checkpoint(root, step)
    assert found is not None
    return quarantine(found, "for nothing")


@pytest.mark.parametrize(
    "place", [".", "recover_info", f"{INFO}.damaged", f"{STATE}.damaged", f"{INFO}.damaged/"]
)
def test_what_was_set_aside_and_is_whole_is_put_back(root: Path, place: str):
    before = tree(root)
    set_aside(root)
    assert list_aside(root) == [(2, ".damaged")]
    code, said = verify(f"{root}/{place}", "--restore")
    assert (code, "the checkpoint is restored" in said) == (0, True), said
    assert tree(root) == before
    assert [one.step for one in find_checkpoints(root, pytest.fail)] == [2, 1]


@pytest.mark.parametrize("path", [f"{STATE}/__1_0.distcp", f"{INFO}/manifest.json"])
def test_what_is_damaged_stays_set_aside(root: Path, path: str):
    data = bytearray((root / path).read_bytes())
    data[-3] ^= 1
    (root / path).write_bytes(data)
    sweep_uncommitted(root)
    if not list_aside(root):
        set_aside(root)
    before = tree(root)
    code, said = verify(root, "--restore")
    assert (code, "is damaged, and keeps its name" in said) == (1, True), said
    assert tree(root) == before


def test_nothing_to_put_back_a_step_that_is_there_and_a_run_that_writes_are_refused(root: Path):
    code, said = verify(root, "--restore")
    assert (code, "has no checkpoint that was renamed to" in said) == (1, True)
    set_aside(root)
    lock = FolderLock(root.parents[3] / "logs/me/x/trial", "here")
    code, said = verify(root, "--restore")
    assert (code, "a run writes there" in said) == (2, True)
    lock.close()
    save(lambda job: run_job(job, QuickDisk()), root, 2)
    before = tree(root)
    code, said = verify(root, "--restore")
    assert (code, "cannot be restored" in said) == (1, True), said
    assert tree(root) == before


class Cut(Disk):
    """Does so many operations."""

    def __init__(self, num: int) -> None:
        self.left = num

    def rename(self, path: Path, target: Path) -> None:
        self._take()
        super().rename(path, target)

    def unlink(self, path: Path) -> None:
        self._take()
        super().unlink(path)

    def _take(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise RunError("the power is cut")


@pytest.mark.parametrize("num", range(4))
def test_a_put_back_that_is_interrupted_loses_nothing(root: Path, num: int):
    before = tree(root)
    set_aside(root)
    aside = read_checkpoint(root, 2, ".damaged")
    assert aside is not None and damage(aside) == []
    with pytest.raises(RunError, match="the power is cut"):
        put_back(aside, Cut(num))
    assert sweep_uncommitted(root) == []
    assert list_aside(root) == [(2, ".damaged")]
    assert verify(root, "--restore")[0] == 0
    assert tree(root) == before


@pytest.mark.parametrize("num", range(3))
def test_a_quarantine_that_is_interrupted_loses_nothing(root: Path, num: int):
    before = tree(root)
    found = read_checkpoint(root, 2)
    assert found is not None
    with pytest.raises(RunError, match="the power is cut"):
        quarantine(found, "why", Cut(num))
    assert sweep_uncommitted(root) == []
    if num:
        assert verify(root, "--restore")[0] == 0
    assert tree(root, "why.txt") == before


def test_an_index_that_a_resume_cannot_read_is_not_whole(tmp_path: Path):
    """Its bytes are those that were saved, and no run saves such."""
    for step, text in enumerate((b"no pickle at all", b"")):
        job = commit_job(tmp_path / str(step), step, [])
        folder = state_folder("default", step)
        from pentad.checkpoint.job import FileSpec, Piece

        files = (*job.files, FileSpec(f"{folder}/.metadata", (Piece("index", (text,)),)))
        run_job(replace(job, files=files))
        code, said = verify(tmp_path / str(step))
        assert (code, ".metadata: is not a whole torch file" in said) == (1, True), said


def test_counters_and_infos_that_a_resume_cannot_read_are_not_whole(tmp_path: Path):
    from checkpoint_saves import index_of

    from pentad.checkpoint.job import FileSpec, Piece

    job = commit_job(tmp_path, 0, [])
    folder = state_folder("default", 0)
    contents = {
        f"{folder}/.metadata": index_of("x"),
        f"{folder}/counters.json": b'{"num_steps": "many"}',
        "recover_info/globalstep0/evaluator_info.json": b"[]",
    }
    files = [FileSpec(path, (Piece("x", (data,)),)) for path, data in contents.items()]
    run_job(replace(job, files=(*job.files, *files)))
    code, said = verify(tmp_path)
    assert code == 1 and "2 damaged" in said, said
    assert "counters.json: does not have the content that a run saves" in said
    assert "evaluator_info.json: is not a JSON object" in said


def test_what_is_not_there_is_damage(root: Path):
    (root / INFO / "manifest.json").unlink()
    with pytest.raises(Damaged):
        read_checkpoint(root, 2)
