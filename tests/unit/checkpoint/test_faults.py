"""Storage that fails at any operation or stalls; writers and parents that are killed."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_saves import (
    CountingDisk,
    FailingDisk,
    QuickDisk,
    commit_job,
    memory_of,
    save,
    write_job,
    write_jobs,
)
from tables import table

from pentad.checkpoint.export_job import BlockSpec, ExportJob, PlaceJob, Runs
from pentad.checkpoint.folders import damage, find_checkpoints
from pentad.checkpoint.job import (
    FileSpan,
    FileSpec,
    Piece,
    Span,
    WriteJob,
    WriterJob,
    run_job,
)
from pentad.checkpoint.quarantine import sweep_uncommitted
from pentad.checkpoint.writer import Writer, failure_in
from pentad.core.errors import RunError
from pentad.core.files import REAL_DISK, Disk

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.close(0)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trial with the checkpoints of steps 0 and 1."""
    root = tmp_path_factory.mktemp("earlier")
    for step in range(2):
        save(lambda job: run_job(job, QuickDisk()), root, step)
    return root


def steps(root: Path) -> list[int]:
    """Of whole checkpoints; each that is committed must be whole."""
    found = find_checkpoints(root, report=lambda sentence: None)
    assert not any(damage(one) for one in found)
    return [one.step for one in found]


def try_save(root: Path, disk: CountingDisk) -> list[OSError | RunError]:
    """As ranks do: one that fails does not keep the others from going on."""
    results: list[dict[str, Any]] = []
    failures: list[OSError | RunError] = []

    def run(job: WriterJob) -> None:
        try:
            results.append(run_job(job, disk))
        except (OSError, RunError) as error:
            failures.append(error)

    for job in write_jobs(root, 2):
        run(job)
    run(commit_job(root, 2, results, failure=failures[0] if failures else None))
    return failures


def num_operations(earlier: Path, tmp_path: Path) -> int:
    root = tmp_path / "count"
    shutil.copytree(earlier, root)
    disk = CountingDisk()
    assert try_save(root, disk) == []
    return disk.count


@pytest.mark.parametrize("is_lasting", table([False, True], [True]), ids=["once", "from then on"])
def test_a_failure_of_any_operation_is_loud_and_harms_nothing(
    earlier: Path, tmp_path: Path, is_lasting: bool
):
    for at in range(1, num_operations(earlier, tmp_path) + 1):
        number = ERRORS[at % len(ERRORS)]
        root = tmp_path / str(at)
        shutil.copytree(earlier, root)
        failures = try_save(root, FailingDisk(at, number, is_lasting=is_lasting))
        found = steps(root)
        if not failures:
            assert found[0] == 2, at
            continue
        assert any(os.strerror(number) in str(failure) for failure in failures), at
        assert all(str(root) in str(failure) for failure in failures), (at, failures)
        if is_lasting and found[0] == 2:  # its COMMIT could not be withdrawn, and it is whole
            assert found == [2, 1, 0], at
            continue
        assert found == [1, 0], at
        if not is_lasting:
            left = [p for p in root.rglob("*") if "globalstep2" in str(p) and p.is_file()]
            assert left == [], (at, left)
        assert try_save(root, CountingDisk()) == [], at
        assert steps(root) == [2, 1], at
        shutil.rmtree(root)


@pytest.mark.parametrize("is_lasting", table([False, True], [False]), ids=["once", "from then on"])
def test_an_export_that_fails_leaves_the_old_one(tmp_path: Path, is_lasting: bool):
    target = tmp_path / "model"

    def export(text: bytes, disk: Disk = REAL_DISK) -> None:
        aside, failure = tmp_path / ".model.writing-1", None
        try:
            run_job(ExportJob(aside, (BlockSpec("config.json", Runs(0, 3), text),)), disk)
        except OSError as error:
            failure = error
        run_job(PlaceJob(aside, target, {"config.json": 3}, failure), disk)

    export(b"old")
    for at in range(1, 30):
        disk = FailingDisk(at, errno.ENOSPC, is_lasting=is_lasting)
        try:
            export(b"new", disk)
        except OSError:
            moved = list(tmp_path.glob(".model.replaced-*"))
            place = target if target.exists() else moved[0]
            assert (place / "config.json").read_bytes() in (b"old", b"new")
            export(b"old")
        else:
            break
    assert (target / "config.json").read_bytes() == b"new"
    assert at > 8


def test_a_full_disk_fails_the_job_and_gives_its_space_back(tmp_path: Path, writer: Writer):
    save(lambda job: writer.submit(job).result(240), tmp_path, 1)
    assert writer.pid is not None
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    memory = memory_of(bytes(3 << 20))
    file = FileSpec(
        "default/recover_checkpoint/globalstep2/f", (Piece("w", (Span(memory, 0, 3 << 20),)),)
    )
    job = WriteJob(tmp_path, "recover_info/globalstep2", (file,))
    pending = writer.submit(job)
    with pytest.raises(OSError, match="File too large.*globalstep2/f") as caught:
        pending.result(240)
    assert caught.value.errno == errno.EFBIG
    assert pending.exception() is caught.value
    assert not (tmp_path / file.path).exists()
    outcome = json.loads(json.dumps(pending.outcome()))
    failure = failure_in(outcome)
    assert isinstance(failure, OSError) and str(failure) == str(caught.value)
    with pytest.raises(OSError, match="File too large.*globalstep2/f"):
        writer.submit(commit_job(tmp_path, 2, [outcome], failure=failure)).result(240)
    assert steps(tmp_path) == [1]
    assert list(tmp_path.rglob("globalstep2")) == []


class Stall:
    """Holds the writer in the middle of a job with SIGSTOP, as storage that stalls would."""

    def __init__(self, writer: Writer) -> None:
        assert writer.pid is not None
        self.pid = writer.pid

    def __enter__(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def __exit__(self, *error: object) -> None:
        os.kill(self.pid, signal.SIGCONT)


def test_stalled_storage_does_not_hold_the_caller(tmp_path: Path, writer: Writer):
    save(lambda job: writer.submit(job).result(240), tmp_path, 1)
    jobs = write_jobs(tmp_path, 2)
    with Stall(writer):
        pendings = [writer.submit(job) for job in jobs]
        time.sleep(0.3)
        assert not any(pending.done() for pending in pendings)
        with pytest.raises(TimeoutError):
            pendings[0].result(0.1)
    run_job(commit_job(tmp_path, 2, [pending.result(240) for pending in pendings]))
    assert pendings[-1].seconds > 0.3
    assert steps(tmp_path) == [2, 1]


def test_a_writer_that_is_killed_fails_its_jobs_and_the_next_one_is_new(
    tmp_path: Path, writer: Writer
):
    save(lambda job: writer.submit(job).result(240), tmp_path, 1)
    assert writer.pid is not None
    first = writer.pid
    os.kill(first, signal.SIGSTOP)
    export = ExportJob(tmp_path / "model", (BlockSpec("config.json", Runs(0, 2), b"{}"),))
    pendings = [writer.submit(job) for job in (write_job(tmp_path, 2, 0), export)]
    os.kill(first, signal.SIGKILL)
    for pending in pendings:
        with pytest.raises(RunError, match="was ended by signal 9"):
            pending.result(240)
        assert "was ended by signal 9" in pending.outcome()["error"]
    save(lambda job: writer.submit(job).result(240), tmp_path, 2)
    assert writer.pid != first
    assert steps(tmp_path) == [2, 1]


PARENT = """
import sys, time
from pathlib import Path
sys.path.append({tests!r})
from checkpoint_saves import commit_job, save, write_jobs
from pentad.checkpoint.writer import Writer
root, writer = Path({root!r}), Writer()
save(lambda job: writer.submit(job).result(240), root, 1)
results = [writer.submit(job).result(240) for job in write_jobs(root, 2)]
late = {{"files": {{"recover_info/globalstep2/late": {{"size": 2}}}}}}
writer.submit(commit_job(root, 2, [*results, late], visible_s=600))
print(writer.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("started_warm")
def test_a_parent_that_is_killed_takes_the_writer_with_it(tmp_path: Path):
    text = PARENT.format(tests=str(Path(__file__).parent), root=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}/status").exists() and time.monotonic() < deadline:
        if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            break
        time.sleep(0.01)
    assert time.monotonic() < deadline, "the writer goes on without its parent"
    late = tmp_path / "recover_info/globalstep2/late"
    late.parent.mkdir(exist_ok=True)
    late.write_text("{}")
    time.sleep(0.1)
    assert steps(tmp_path) == [1]
    sweep_uncommitted(tmp_path)
    assert list(tmp_path.rglob("globalstep2")) == []


def test_signals_to_all_processes_of_a_run_do_not_end_the_writer(tmp_path: Path, writer: Writer):
    save(lambda job: writer.submit(job).result(240), tmp_path, 1)
    assert writer.pid is not None
    first = writer.pid
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(first, number)
    save(lambda job: writer.submit(job).result(240), tmp_path, 2)
    assert writer.pid == first


def test_close_waits_for_the_jobs_under_way(tmp_path: Path, writer: Writer):
    results = [writer.submit(job).result(240) for job in write_jobs(tmp_path, 1)]
    path = tmp_path / next(iter(results[0]["files"]))
    aside = path.rename(tmp_path / "aside")
    pending = writer.submit(commit_job(tmp_path, 1, results, visible_s=240))
    timer = threading.Timer(0.5, lambda: aside.rename(path))
    timer.start()
    writer.close()
    assert pending.done() and pending.exception() is None
    assert steps(tmp_path) == [1]


def test_an_export_does_not_hold_up_the_state_of_a_later_step(tmp_path: Path, writer: Writer):
    """One process writes both, each in an order of its own."""
    os.mkfifo(tmp_path / "held")

    held = FileSpan(tmp_path / "held", 0, 1)  # opening a pipe that has no other end blocks
    export = ExportJob(tmp_path / "model", (BlockSpec("w", Runs(0, 1), held),))
    waiting = writer.submit(export)
    pendings = [writer.submit(job) for job in write_jobs(tmp_path, 1)]
    run_job(commit_job(tmp_path, 1, [pending.result(240) for pending in pendings]))
    assert steps(tmp_path) == [1] and not waiting.done()


def test_the_writer_needs_neither_torch_nor_numpy():
    code = "import sys, pentad.checkpoint.writer; print({'torch', 'numpy'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_a_process_with_thousands_of_open_files_can_have_a_writer(tmp_path: Path, writer: Writer):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        save(lambda job: writer.submit(job).result(240), tmp_path, 1)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert steps(tmp_path) == [1]
