"""Every kind of damage to every kind of file is seen and named, and the one before is used."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_saves import QuickDisk, save

from pentad.checkpoint.folders import (
    Damaged,
    Manifest,
    commit_marker,
    damage,
    find_checkpoints,
    prune,
    read_file,
)
from pentad.checkpoint.job import run_job
from pentad.checkpoint.quarantine import quarantine, sweep_uncommitted

DATA = {
    "distcp": "default/recover_checkpoint/globalstep2/__1_0.distcp",
    "metadata": "default/recover_checkpoint/globalstep2/.metadata",
    "critic": "critic/recover_checkpoint/globalstep2/__0_0.distcp",
    "info": "recover_info/globalstep2/dataloader_info.json",
    "groups": "recover_info/globalstep2/groups.bin",
}
MARKS = {
    "manifest": "recover_info/globalstep2/manifest.json",
    "COMMIT": "recover_info/globalstep2/COMMIT",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save(lambda job: run_job(job, QuickDisk()), root, step, ("default", "critic"))
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "trial"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def remove(path: Path) -> None:
    path.unlink()


def put_stale(path: Path) -> None:
    """The file of the step before."""
    path.write_bytes(Path(str(path).replace("globalstep2", "globalstep1")).read_bytes())


def swap(path: Path) -> None:
    """With another file of the same checkpoint."""
    other = path.with_name("step_info.json" if path.parent.parent.name == "recover_info" else "x")
    if other.name == "x":
        other = next(p for p in sorted(path.parent.iterdir()) if p != path)
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


WAYS = (flip, truncate, lengthen, zero, remove, put_stale, swap, replace_by_folder)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", DATA)
def test_damaged_data_is_named_and_the_one_before_is_used(
    root: Path, kind: str, way: Callable[[Path], None]
):
    path = root / DATA[kind]
    way(path)
    newest, before = find_checkpoints(root, report=pytest.fail)
    sentences = damage(newest)
    assert any(sentence.startswith(f"{path}: ") for sentence in sentences)
    with pytest.raises(Damaged, match=path.name):
        read_file(newest, DATA[kind])
    aside = quarantine(newest, sentences[0])
    assert aside == root / "recover_info" / "globalstep2.damaged"
    assert (aside / "why.txt").read_text() == sentences[0] + "\n"
    assert [found.step for found in find_checkpoints(root, report=pytest.fail)] == [1]
    assert damage(before) == []
    assert sweep_uncommitted(root) == []
    assert (root / "default/recover_checkpoint/globalstep2.damaged").is_dir()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", MARKS)
def test_a_damaged_mark_is_reported_and_the_one_before_is_used(
    root: Path, kind: str, way: Callable[[Path], None]
):
    way(root / MARKS[kind])
    said: list[str] = []
    assert [found.step for found in find_checkpoints(root, said.append)] == [1]
    (sentence,) = said
    assert "globalstep2" in sentence and "skipped" in sentence
    sweep_uncommitted(root, QuickDisk())
    is_removed = kind == "COMMIT" and way is remove  # then it was never committed
    kept = {p.name for p in root.rglob("globalstep2*")}
    assert kept == (set() if is_removed else {"globalstep2.damaged"})
    save(lambda job: run_job(job, QuickDisk()), root, 2, ("default", "critic"))
    assert [found.step for found in find_checkpoints(root, pytest.fail)] == [2, 1]


def test_marks_of_another_step_are_foreign(root: Path):
    for path in MARKS.values():
        put_stale(root / path)
    said: list[str] = []
    assert [found.step for found in find_checkpoints(root, said.append)] == [1]
    assert "belongs to step 1, not to 2" in said[0]


def test_a_piece_is_named(root: Path):
    path = root / DATA["distcp"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (sentence,) = damage(find_checkpoints(root)[0])
    assert (
        sentence
        == f"{path}: piece model.b (bytes 408 to 1008) does not have the digest it was saved with"
    )


@pytest.mark.parametrize(
    "path", ["../../etc/passwd", "/etc/passwd", "default//x", "recover_info/globalstep1/a", "a/./b"]
)
def test_a_manifest_names_files_of_its_own_step_alone(root: Path, path: str):
    found = find_checkpoints(root)[0]
    files = {**found.manifest.files, path: next(iter(found.manifest.files.values()))}
    data = Manifest(2, files).to_bytes()
    (root / MARKS["manifest"]).write_bytes(data)
    (root / MARKS["COMMIT"]).write_bytes(commit_marker(data))
    said: list[str] = []
    assert [found.step for found in find_checkpoints(root, said.append)] == [1]
    assert "manifest.json: cannot be used" in said[0]


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[1]", b"null", b'{"digest": 1}', b"\xff", b"[" * 10**5]
)
def test_garbage_is_no_manifest(text: bytes):
    with pytest.raises(ValueError):
        Manifest.from_bytes(text)


def test_a_second_quarantine_of_a_step_gets_a_name_of_its_own(root: Path):
    quarantine(find_checkpoints(root)[0], "first")
    save(lambda job: run_job(job, QuickDisk()), root, 2, ("default", "critic"))
    assert quarantine(find_checkpoints(root)[0], "second").name == "globalstep2.damaged-2"


def test_pruning_keeps_what_may_not_be_deleted(root: Path):
    save(lambda job: run_job(job, QuickDisk()), root, 3, ("default", "critic"), keep_last=3)
    removed = prune(root, 1, may_delete=lambda found: found.step != 1)
    assert [path.name for path in removed] == ["globalstep2"]
    assert [found.step for found in find_checkpoints(root, pytest.fail)] == [3, 1]
    assert not list(root.rglob("globalstep2"))
