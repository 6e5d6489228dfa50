"""What another user puts into /dev/shm or /tmp: no start opens it, waits for it or removes it."""

import fcntl
import os
import socket
from pathlib import Path

import pytest

from pentad.core import scratch
from pentad.core.scratch import open_own
from pentad.data import file_blobs
from pentad.runtime import group_calls
from pentad.sync.transport import transfer_folder

pytestmark = pytest.mark.timeout(60)


def remove_blobs(place):
    file_blobs.make_blobs(place).close()


def remove_scratch(place):
    with scratch.scratch_folder("pentad-weights-", place):
        pass


STARTS = {
    "store": (remove_blobs, file_blobs.PREFIX, scratch.OWNER),
    "store of an earlier version": (remove_blobs, file_blobs.PREFIX, scratch.OF_EARLIER_VERSIONS),
    "scratch": (remove_scratch, "pentad-weights-", scratch.OWNER),
}
"""What a start looks through: the names of folders, and of the file in each that is opened."""


@pytest.fixture(params=STARTS)
def start(request, tmp_path, monkeypatch):
    """A start, the folder all users write to, a folder in it that a start looks at, and the name of
    the file there."""
    run, prefix, name = STARTS[request.param]
    place = tmp_path / "shared"
    place.mkdir()
    return run, place, place / f"{prefix}x", name


def fifo(path):
    os.mkfifo(path)


def link_to_fifo(path):
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def link_to_file(path):
    path.with_name("elsewhere").write_text("x")
    path.symlink_to("elsewhere")


def link_to_itself(path):
    path.symlink_to(path.name)


def unix_socket(path):
    cwd = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(cwd)


def held(path):
    """By a process of ours that lives."""
    file = path.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


FILES = {
    "a FIFO": fifo,
    "a link to a FIFO": link_to_fifo,
    "a link to a file": link_to_file,
    "a link to itself": link_to_itself,
    "a folder": lambda path: path.mkdir(),
    "a socket": unix_socket,
    "nothing": lambda path: None,
    "a file that is held": held,
}


@pytest.mark.parametrize("kind", FILES)
def test_a_start_passes_by_what_is_no_file_of_a_dead_run(start, kind):
    run, place, folder, name = start
    folder.mkdir(mode=0o700)
    kept = FILES[kind](folder / name)
    before = sorted(path.name for path in folder.iterdir())
    run(place)
    assert sorted(path.name for path in folder.iterdir()) == before
    del kept


def test_a_start_passes_by_folders_and_files_of_other_users(start, monkeypatch):
    run, place, folder, name = start
    folder.mkdir(mode=0o700)
    (folder / name).write_bytes(b"")
    own = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: own + 1)
        run(place)
    assert (folder / name).is_file()
    run(place)  # it is ours after all, and its maker is gone
    assert not folder.exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777])
def test_a_start_passes_by_folders_that_others_can_change(start, mode):
    run, place, folder, name = start
    folder.mkdir()
    (folder / name).write_bytes(b"")
    folder.chmod(mode)
    run(place)
    assert (folder / name).is_file()


def test_a_start_follows_no_link_to_a_folder(start, tmp_path):
    run, place, folder, name = start
    target = tmp_path / "precious"
    target.mkdir(mode=0o700)
    (target / name).write_bytes(b"")
    folder.symlink_to(target)
    run(place)
    assert (target / name).is_file()


def test_a_start_reads_nothing_of_a_huge_file_and_removes_it(start):
    run, place, folder, name = start
    folder.mkdir(mode=0o700)
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)
    run(place)
    assert not folder.exists()


def test_what_is_opened_is_a_plain_file_of_ours(tmp_path):
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "own" / "file").write_text("text")
    file = open_own(tmp_path / "own" / "file")
    assert os.read(file, 10) == b"text"
    os.close(file)
    with pytest.raises(OSError, match="not a plain file of this user"):
        os.mkfifo(tmp_path / "own" / "fifo")
        open_own(tmp_path / "own" / "fifo")


def test_folders_of_a_run_are_closed_to_others(tmp_path):
    old = os.umask(0)
    try:
        with (
            scratch.scratch_folder(group_calls.MEETING, tmp_path) as meeting,
            transfer_folder(tmp_path, is_private=True) as own,
            transfer_folder(tmp_path, is_private=False) as seen,
        ):
            blobs = file_blobs.make_blobs(tmp_path)
            modes = [oct(p.stat().st_mode & 0o777) for p in (meeting, own, blobs.folder, seen)]
            blobs.close()
    finally:
        os.umask(old)
    assert modes == ["0o700", "0o700", "0o700", "0o755"]
    assert not list(tmp_path.iterdir())


PLANTED = ["weights.safetensors", "pentad-transfer-x", "pentad-weights-x"]


@pytest.mark.parametrize("name", PLANTED)
def test_weights_are_written_to_no_name_that_others_can_guess(tmp_path, name):
    (tmp_path / name).symlink_to(tmp_path / "target")
    with transfer_folder(tmp_path, is_private=True) as folder:
        (folder / "weights.safetensors").write_bytes(b"x")
    assert not (tmp_path / "target").exists()
