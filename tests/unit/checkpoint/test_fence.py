"""A writer of an earlier generation is refused, whenever it comes."""

import os

import pytest

from pentad.checkpoint import job as jobs
from pentad.checkpoint.fence import raise_fence, read_fence
from pentad.checkpoint.folders import find_checkpoints, info_folder
from pentad.checkpoint.job import CommitJob, FileSpec, Piece, WriteJob, run_job
from pentad.core.errors import RunError, UserError


def write_job(root, text, generation):
    files = (FileSpec("default/recover_checkpoint/globalstep3/x", (Piece("x", (text,)),)),)
    return WriteJob(root, info_folder(3), files, generation)


def commit_job(root, generation, result):
    return CommitJob(root, info_folder(3), result["files"], (), generation=generation)


def test_a_late_writer_is_refused_and_the_next_generation_commits(tmp_path):
    first = raise_fence(tmp_path)
    old = run_job(write_job(tmp_path, b"old", first))
    second = raise_fence(tmp_path)
    assert (first, second, read_fence(tmp_path)) == (2, 3, 3)
    with pytest.raises(
        RunError, match="written by generation 2 of the learners, and 3 has started"
    ):
        run_job(commit_job(tmp_path, first, old))
    with pytest.raises(RunError, match="it is ignored"):
        run_job(write_job(tmp_path, b"older", first))
    new = run_job(write_job(tmp_path, b"new", second))
    run_job(commit_job(tmp_path, second, new))
    (found,) = find_checkpoints(tmp_path, report=print)
    path = tmp_path / "default/recover_checkpoint/globalstep3/x"
    assert found.step == 3 and path.read_bytes() == b"new"


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"two", b"-3", "²".encode(), b"[" * 10_000])
def test_a_number_that_cannot_be_read_is_none(tmp_path, data):
    (tmp_path / ".generation").write_bytes(data)
    assert read_fence(tmp_path) == 0 and raise_fence(tmp_path) == 2


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_in_place_of_the_number_is_not_waited_for(tmp_path, make):
    make(tmp_path / ".generation")
    with pytest.raises(UserError, match=r"\.generation: is a .*not a file"):
        read_fence(tmp_path)


def test_a_commit_that_is_overtaken_just_before_its_mark_leaves_none(tmp_path, monkeypatch):
    first, plain = raise_fence(tmp_path), jobs._settle_names
    old = run_job(write_job(tmp_path, b"old", first))

    def overtaken(*args):
        plain(*args)
        raise_fence(tmp_path)

    monkeypatch.setattr(jobs, "_settle_names", overtaken)
    with pytest.raises(RunError, match="3 has started"):
        run_job(commit_job(tmp_path, first, old))
    assert not find_checkpoints(tmp_path, report=print)


@pytest.mark.parametrize("place", ["check_written", "_settle_names"])
def test_a_commit_that_another_generation_overtook_removes_nothing_of_it(
    tmp_path, monkeypatch, place
):
    first, plain = raise_fence(tmp_path), getattr(jobs, place)
    old = run_job(write_job(tmp_path, b"old", first))

    def overtaken(*args):
        plain(*args)
        monkeypatch.setattr(jobs, place, plain)
        second = raise_fence(tmp_path)
        new = run_job(write_job(tmp_path, b"new", second))
        run_job(commit_job(tmp_path, second, new))

    monkeypatch.setattr(jobs, place, overtaken)
    with pytest.raises(RunError, match="3 has started"):
        run_job(commit_job(tmp_path, first, old))
    (found,) = find_checkpoints(tmp_path, report=print)
    path = tmp_path / "default/recover_checkpoint/globalstep3/x"
    assert found.step == 3 and path.read_bytes() == b"new"


def test_a_folder_that_is_not_there_is_not_made_for_it(tmp_path):
    root = tmp_path / "trial"
    first = raise_fence(root)
    assert not root.exists()
    old = run_job(write_job(root, b"old", first))
    assert raise_fence(root) == first + 1
    with pytest.raises(RunError, match="written by generation 1"):
        run_job(commit_job(root, first, old))
