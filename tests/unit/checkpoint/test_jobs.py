"""Jobs write what they are given, in this process and through the writer's, and commit it."""

import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from checkpoint_saves import Runner, commit_job, data_files, save, write_job

from pentad.checkpoint import job
from pentad.checkpoint.export_job import BlockSpec, ExportJob, PlaceJob, Runs
from pentad.checkpoint.folders import damage, find_checkpoints, read_file
from pentad.checkpoint.job import FileSpec, Lazy, Piece, WriteJob, run_job
from pentad.checkpoint.writer import Writer
from pentad.core.errors import RunError
from pentad.runtime.rank import pulse


@pytest.fixture(params=["here", "writer"])
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    if request.param == "here":
        yield run_job
        return
    writer = Writer()
    yield lambda job: writer.submit(job).result(240)
    writer.close()


def test_a_committed_checkpoint_is_found_and_whole(tmp_path: Path, run: Runner):
    root = tmp_path / "new" / "root"
    result = save(run, root, 3)
    (found,) = find_checkpoints(root)
    assert (found.step, found.manifest.facts["world"]) == (3, 2)
    assert damage(found) == []
    sizes = {path: entry.size for path, entry in found.manifest.files.items()}
    assert sizes == {str(p.relative_to(root)): p.stat().st_size for p in data_files(root, 3)}
    assert result["bytes"] == found.manifest.num_bytes == sum(sizes.values())
    data = read_file(found, "default/recover_checkpoint/globalstep3/__1_0.distcp")
    assert data == b"head" + bytes([3, 1]) * 200 + b"tail" + bytes([3, 1]) * 300
    assert (root / "recover_info" / "step_info.json").read_bytes() == read_file(
        found, f"{found.info}/step_info.json"
    )
    assert {p.name for p in root.rglob(".*")} == {".metadata"}


def test_older_checkpoints_are_removed_but_those_kept(tmp_path: Path, run: Runner):
    for step in range(4):
        save(run, tmp_path, step, keep_last=1, keep_steps=(1,))
    assert [found.step for found in find_checkpoints(tmp_path)] == [3, 1]
    names = sorted(p.name for p in (tmp_path / "default/recover_checkpoint").iterdir())
    assert names == ["globalstep1", "globalstep3"]


def test_a_rank_that_failed_fails_the_commit_with_its_words(tmp_path: Path, run: Runner):
    save(run, tmp_path, 1)
    good = run(write_job(tmp_path, 2, 0))
    with pytest.raises(RunError, match="rank 1 has no space"):
        run(commit_job(tmp_path, 2, [good], failure=RunError("rank 1 has no space")))
    assert [found.step for found in find_checkpoints(tmp_path)] == [1]
    assert list(tmp_path.rglob("*globalstep2*")) == []
    save(run, tmp_path, 2)
    assert [found.step for found in find_checkpoints(tmp_path)] == [2, 1]


def test_a_file_that_is_not_seen_fails_the_commit(tmp_path: Path, run: Runner):
    good, elsewhere = run(write_job(tmp_path, 2, 0)), run(write_job(tmp_path / "other", 2, 1))
    words = "__1_0.distcp: written by a rank, but not visible here after 0.1 s; every rank must"
    with pytest.raises(RunError, match=words):
        run(commit_job(tmp_path, 2, [good, elsewhere], visible_s=0.1))
    shutil.rmtree(tmp_path / "other")
    assert list(tmp_path.rglob("*globalstep2*")) == []


def test_what_is_committed_is_not_written_again(tmp_path: Path, run: Runner):
    save(run, tmp_path, 1)
    with pytest.raises(RunError, match="is committed"):
        run(write_job(tmp_path, 1, 0))
    (found,) = find_checkpoints(tmp_path)
    assert damage(found) == []


def test_a_thread_asks_for_lazy_bytes_one_after_the_other(tmp_path: Path):
    own = threading.local()

    def give(value: int) -> memoryview:
        own.buffer = vars(own).get("buffer") or bytearray(3)
        own.buffer[:] = bytes([value]) * 3
        return memoryview(own.buffer)

    pieces = tuple(Piece(str(n), (Lazy(3, partial(give, n)), b"-")) for n in range(64))
    run_job(WriteJob(tmp_path, "recover_info/globalstep0", (FileSpec("d/f", pieces),)))
    assert (tmp_path / "d/f").read_bytes() == b"".join(bytes([n]) * 3 + b"-" for n in range(64))


def test_an_export_replaces_a_folder_whole(tmp_path: Path, run: Runner):
    target = tmp_path / "model"
    aside = tmp_path / ".model.writing-1"
    for first, second in ((b"old", b"er"), (b"new", b"er")):
        run(ExportJob(aside, (BlockSpec("weights", Runs(3, 2), second),)))
        run(ExportJob(aside, (BlockSpec("weights", Runs(0, 3), first),)))
        run(PlaceJob(aside, target, {"weights": 5}))
        assert (target / "weights").read_bytes() == first + second
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_every_part_that_is_written_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "CHUNK_BYTES", 2)
    for first in (b"abcdef", Lazy(6, lambda: memoryview(b"abcdef"))):
        before = pulse.count
        file = FileSpec("d/f", (Piece("one", (first,)), Piece("two", (b"gh",))))
        run_job(WriteJob(tmp_path / str(before), "recover_info/globalstep0", (file,)))
        assert pulse.count == before + 4
    run_job(
        ExportJob(tmp_path / "model", tuple(BlockSpec("w", Runs(n, 1), b"-") for n in range(3)))
    )
    assert pulse.count >= before + 4 + 3


def test_blocks_of_columns_are_written_by_runs(tmp_path: Path, run: Runner):
    left = BlockSpec("w", Runs(0, 2, ((3, 5),)), b"aabbcc")
    right = BlockSpec("w", Runs(2, 3, ((3, 5),)), b"AAABBBCCC")
    run(ExportJob(tmp_path / "a", (right,)))
    run(ExportJob(tmp_path / "a", (left,)))
    assert (tmp_path / "a" / "w").read_bytes() == b"aaAAAbbBBBccCCC"


@pytest.mark.parametrize("reason", ["a rank failed", "bytes are missing"])
def test_an_export_that_is_not_whole_is_removed_and_the_old_one_stays(
    tmp_path: Path, run: Runner, reason: str
):
    aside, target = tmp_path / ".model.writing-1", tmp_path / "model"
    target.mkdir()
    run(ExportJob(aside, (BlockSpec("weights", Runs(0, 3), b"abc"),)))
    failure = RunError("rank 1 has no space") if reason == "a rank failed" else None
    words = "rank 1 has no space" if failure else "has 3 bytes, not 5"
    with pytest.raises(RunError, match=words):
        run(PlaceJob(aside, target, {"weights": 5}, failure))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_jobs_of_a_writer_that_was_closed_fail_and_start_no_process(tmp_path: Path):
    """A call of the learner that a run did not wait for comes to its save after the run."""
    writer = Writer()
    writer.close()
    with pytest.raises(RunError, match="the run has ended, and its writer with it"):
        writer.submit(write_job(tmp_path, 2, 0)).result(240)
    assert writer.pid is None and list(tmp_path.iterdir()) == []
