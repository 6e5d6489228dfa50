"""Files and folders are whole or not there, whichever operation of the disk fails."""

import errno
import subprocess
import sys

import pytest

from pentad.core.files import (
    Disk,
    atomic_folder,
    file_digest,
    is_being_written,
    place_folder,
    remove_tree,
    sweep,
    write_atomic,
)

OPERATIONS = ("make_dir", "create", "write", "fsync", "close", "fsync_dir", "rename", "unlink")


class FailingDisk(Disk):
    """The operation of this number fails, and those after it where it is lasting."""

    def __init__(self, at: int, *, is_lasting: bool) -> None:
        self.left, self.is_lasting = at, is_lasting

    def __getattribute__(self, name):
        if name in OPERATIONS:
            self.left -= 1
            if self.left == 0 or (self.left < 0 and self.is_lasting):
                raise OSError(errno.EIO, "it fails")
        return super().__getattribute__(name)


def attempts(write, *, is_lasting):
    """Whether each attempt came through, up to the first that did."""
    for at in range(1, 30):
        try:
            write(FailingDisk(at, is_lasting=is_lasting))
        except OSError:
            yield False
        else:
            yield True
            return
    raise AssertionError("none came through")


@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from then on"])
def test_a_file_is_the_old_or_the_new_one(tmp_path, is_lasting):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    num_failed = 0
    for came_through in attempts(
        lambda disk: write_atomic(path, [b"new", memoryview(b" text")], disk), is_lasting=is_lasting
    ):
        num_failed += not came_through
        assert path.read_bytes() in ((b"new text",) if came_through else (b"old", b"new text"))
        if not is_lasting:
            assert [one.name for one in tmp_path.iterdir()] == ["file"]
        write_atomic(path, b"old")
    assert num_failed >= 4


def test_data_that_cannot_be_made_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def parts():
        yield b"new"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_atomic(path, parts())
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("is_lasting", [False, True], ids=["once", "from then on"])
def test_a_folder_is_the_old_or_the_new_one(tmp_path, is_lasting):
    target = tmp_path / "model"
    with atomic_folder(target) as aside:
        (aside / "a").write_text("old")

    def write(disk):
        with atomic_folder(target, disk) as aside:
            (aside / "a").write_text("new")

    for came_through in attempts(write, is_lasting=is_lasting):
        sweep(tmp_path)
        assert (target / "a").read_text() in (("new",) if came_through else ("old", "new"))
        assert [one.name for one in tmp_path.iterdir()] == ["model"]
        (target / "a").write_text("old")


def test_a_body_that_raises_leaves_the_old_folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "model") as aside:
        (aside / "a").write_text("half")
        raise RuntimeError
    assert (tmp_path / "model" / "a").read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


def test_a_file_in_the_place_of_a_folder_is_replaced_whole(tmp_path):
    (tmp_path / "model").write_text("a file")
    (tmp_path / "made").mkdir()
    place_folder(tmp_path / "made", tmp_path / "model")
    assert [one.name for one in tmp_path.iterdir()] == ["model"] and (tmp_path / "model").is_dir()


def test_only_a_live_writer_counts_as_one(tmp_path):
    target = tmp_path / "model[1]"
    with atomic_folder(target):
        assert is_being_written(target) and not is_being_written(tmp_path / "model1")
    assert not is_being_written(target)
    code = f"""
import os, pathlib
from pentad.core.files import atomic_folder
with atomic_folder(pathlib.Path({str(target)!r})):
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2 and not is_being_written(target)
    with atomic_folder(target):
        assert len(list(tmp_path.iterdir())) == 2, "what the dead one left is gone"


def test_links_are_removed_and_not_followed(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "a").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "precious")
    remove_tree(Disk(), tmp_path / "folder")
    remove_tree(Disk(), tmp_path / "folder")
    assert (tmp_path / "precious" / "a").exists() and not (tmp_path / "folder").exists()


def test_the_digest_is_of_all_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    (tmp_path / "b").write_bytes(b"x" * 99_999 + b"y")
    assert file_digest(tmp_path / "a") != file_digest(tmp_path / "b")
