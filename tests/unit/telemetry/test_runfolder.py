"""One run, one config, one program a folder; every file in it is explained."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from pentad.core.errors import RunError, UserError
from pentad.core.lock import NAME, FolderLock
from pentad.telemetry.host import git_state, hardware, rss_gb, versions
from pentad.telemetry.runfolder import FILES, describe_start, file_table, open_run_folder, run_path
from pentad.telemetry.steps import LineWriter, read_lines

CONFIG = {"seed": 1, "actor": {"path": "m", "lr": 1e-4}}


@pytest.fixture(autouse=True)
def unlocked(monkeypatch):
    """Folders that a test leaves open; each lock has a thread."""
    made, plain = [], FolderLock.__init__

    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(FolderLock, "__init__", init)
    yield
    for lock in made:
        lock.close()


def open_folder(path, config=CONFIG, digest="d1", **more):
    return open_run_folder(
        path,
        config=config,
        config_yaml="seed: 1\n",
        config_digest=digest,
        seed=1,
        **more,
    )


def write_steps(path, num):
    writer = LineWriter(path / "steps.jsonl")
    for step in range(1, num + 1):
        writer.append({"step": step})
    writer.close()


def test_the_path_is_that_of_the_seed(monkeypatch):
    assert run_path("runs", "exp", "trial-0", "ann") == Path("runs/logs/ann/exp/trial-0")
    monkeypatch.setenv("LOGNAME", "bob")
    assert run_path("runs", "exp", "t") == Path("runs/logs/bob/exp/t")


def test_a_new_folder_holds_config_manifest_and_explanation(tmp_path):
    folder = open_folder(tmp_path / "a" / "b", exports=Path("runs/checkpoints"))
    folder.add_start(describe_start(self_test={"packed": 1e-7}))
    manifest = json.loads((tmp_path / "a" / "b" / "manifest.json").read_text())
    assert (manifest["config_digest"], manifest["seed"], manifest["config"]) == ("d1", 1, CONFIG)
    (start,) = manifest["starts"]
    assert start["versions"]["python"] == sys.version.split()[0]
    assert start["versions"]["torch"] and start["hardware"]["num_cpus"] >= 1
    assert start["self_test"] == {"packed": 1e-7}
    assert (folder.path / "config.yaml").read_text() == "seed: 1\n"
    text = (folder.path / "README.md").read_text()
    assert all(f"`{name}`" in text for name in FILES) and "runs/checkpoints" in text
    assert {entry.name for entry in folder.path.iterdir()} <= set(FILES)


def test_every_start_is_kept(tmp_path):
    for device in ("cpu", "cuda"):
        folder = open_folder(tmp_path)
        folder.add_start(describe_start(device=device))
        folder.close()
    starts = json.loads((tmp_path / "manifest.json").read_text())["starts"]
    assert [start["device"] for start in starts] == ["cpu", "cuda"]


def test_a_config_that_the_caller_refuses_leaves_the_folder_as_it_was(tmp_path):
    open_folder(tmp_path).close()
    seen = []

    def refuse(before):
        seen.append(before)
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        open_folder(tmp_path, {"seed": 2}, "d2", accept=refuse)
    assert seen == [CONFIG]
    open_folder(tmp_path).close()  # unlocked


def test_changes_that_are_accepted_are_noted_with_the_start(tmp_path):
    open_folder(tmp_path).close()
    folder = open_folder(tmp_path, {"seed": 2}, "d2", accept=lambda before: ["seed was 1, is 2"])
    assert json.loads((tmp_path / "manifest.json").read_text())["config"] == CONFIG
    folder.add_start(describe_start(from_step=3, generation=1))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (manifest["config"], manifest["config_digest"]) == ({"seed": 2}, "d2")
    (start,) = manifest["starts"]
    assert start["config_changes"] == ["seed was 1, is 2"] and start["from_step"] == 3


def test_a_run_that_resumes_takes_a_folder_with_steps_and_models(tmp_path):
    path, exports = tmp_path / "logs", tmp_path / "checkpoints"
    open_folder(path, exports=exports).close()
    write_steps(path, 3)
    write_export(exports, 2)
    folder = open_folder(path, exports=exports, resumes=True)
    assert len(read_lines(folder.file("steps.jsonl"))) == 3
    folder.close()
    shutil.rmtree(path)
    with pytest.raises(UserError, match="already holds models of an earlier run"):
        open_folder(path, exports=exports, resumes=True)
    open_folder(path, exports=exports, resumes=True, has_checkpoint=True).close()


def test_a_folder_with_steps_is_not_overwritten(tmp_path):
    open_folder(tmp_path).close()
    write_steps(tmp_path, 3)
    with pytest.raises(UserError, match="already holds a run of 3 steps; choose another"):
        open_folder(tmp_path)


def test_starting_anew_keeps_the_earlier_records(tmp_path):
    for number in (1, 2):
        open_folder(tmp_path, fresh=True).close()
        write_steps(tmp_path, number)
    open_folder(tmp_path, {"seed": 9}, "d9", fresh=True)
    assert read_lines(tmp_path / "steps.jsonl") == []
    kept = [len(read_lines(tmp_path / "earlier" / n / "steps.jsonl")) for n in ("001", "002")]
    assert kept == [1, 2]


def write_export(exports, step):
    folder = exports / "default" / f"epoch0epochstep{step}globalstep{step}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_starting_anew_keeps_the_earlier_models_apart(tmp_path):
    path, exports = tmp_path / "logs", tmp_path / "checkpoints"
    for _ in range(2):
        open_folder(path, fresh=True, exports=exports).close()
        write_steps(path, 1)
        write_export(exports, 3)
    open_folder(path, fresh=True, exports=exports).close()
    assert [entry.name for entry in exports.iterdir()] == ["earlier"]
    for number in ("001", "002"):
        assert (path / "earlier" / number / "steps.jsonl").exists()
        assert list((exports / "earlier" / number / "default").iterdir())


def test_models_without_records_are_not_mixed_with_new_ones(tmp_path):
    exports = tmp_path / "checkpoints"
    write_export(exports, 3)
    with pytest.raises(UserError, match="already holds models of an earlier run, such as epoch0"):
        open_folder(tmp_path / "logs", exports=exports)
    open_folder(tmp_path / "logs", exports=exports, fresh=True).close()


def test_a_folder_that_was_deleted_or_replaced_is_noticed(tmp_path):
    folder = open_folder(tmp_path / "run")
    folder.check_there()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunError, match="was deleted or replaced while the run was active"):
        folder.check_there()
    other = open_folder(tmp_path / "run")  # as a second program might
    with pytest.raises(RunError, match="was deleted or replaced"):
        folder.check_there()
    other.check_there()


def test_a_second_program_is_refused_and_the_lock_ends_with_its_holder(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from pentad.telemetry.runfolder import open_run_folder\n"
        f"f = open_run_folder(pathlib.Path({str(tmp_path)!r}), config={{}}, config_yaml='',"
        " config_digest='d1', seed=1)\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(UserError, match=f"another program runs in it .process {other.pid} on"):
            open_folder(tmp_path)
    finally:
        other.kill()
        other.wait()
        other.stdin.close(), other.stdout.close()
    open_folder(tmp_path).close()


@pytest.mark.parametrize("lives", [True, False])
def test_a_holder_on_another_machine_is_gone_when_it_does_not_touch_its_lock(
    tmp_path, monkeypatch, lives
):
    """As on a file system whose locks do not reach other machines."""
    monkeypatch.setattr("pentad.core.lock.BEAT_S", 0.05)
    monkeypatch.setattr("pentad.core.lock.SILENCE_S", 1.0)
    file = tmp_path / "run.lock"
    file.write_text("process 7 on elsewhere since 2026-01-01T00:00:00+00:00\n")
    over = threading.Event()

    def touch():
        while lives and not over.wait(0.1):
            file.touch()

    other = threading.Thread(target=touch)
    other.start()
    try:
        if lives:
            with pytest.raises(UserError, match="runs in it .process 7 on elsewhere since 2026-01"):
                open_folder(tmp_path)
        else:
            open_folder(tmp_path).close()
            assert file.read_text() == ""
    finally:
        over.set()
        other.join()


def test_the_holder_touches_its_lock_and_a_dead_one_here_is_taken_over_at_once(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("pentad.core.lock.BEAT_S", 0.05)
    file = tmp_path / "run.lock"
    file.write_text(f"process 99999999 on {os.uname().nodename} since 2026-01-01T00:00:00+00:00\n")
    with closing(open_folder(tmp_path)):
        assert f"process {os.getpid()} on {os.uname().nodename} since 2" in file.read_text()
        os.utime(file, (0, 0))
        end = time.monotonic() + 120
        while file.stat().st_mtime == 0:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_an_unwritable_folder_is_refused():
    # Not even root makes folders in /proc.
    with pytest.raises(
        UserError, match="^run folder = /proc/x/y: cannot be written .*set fileroot"
    ):
        open_folder(Path("/proc/x/y"))


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="cannot be written .(File exists|Not a directory)"):
        open_folder(tmp_path / "x")


KINDS = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_in_the_place_of_a_record_is_refused(tmp_path, kind):
    names = [name for name in FILES if not name.endswith("/") and name != NAME]
    for name in names:
        KINDS[kind](tmp_path / name)
    with pytest.raises(UserError) as raised:
        open_folder(tmp_path, resumes=True)
    said = [str(problem) for problem in raised.value.problems]
    assert len(said) == len(names) >= 10
    for name, one in zip(names, said, strict=True):
        assert one.startswith(f"{tmp_path / name}: is a ") and "not a file" in one


def test_a_foreign_manifest_is_refused(tmp_path):
    for text in ("{", "[]", "{}"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(UserError, match="manifest.json: not the manifest of a run"):
            open_folder(tmp_path)


def test_the_documentation_explains_every_file():
    page = (Path(__file__).parents[3] / "docs" / "run-files.md").read_text()
    assert file_table() in page


def test_the_machine_is_described():
    assert versions()["torch"].startswith("2.")
    assert hardware()["memory_gb"] > 0
    assert 0.01 < rss_gb() < hardware()["memory_gb"]


def test_a_commit_is_reported_only_for_the_root_of_a_checkout(tmp_path):
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    state = git_state(tmp_path)
    assert len(state["commit"]) == 40 and state["is_modified"] is False
    (tmp_path / "f").write_text("2")
    assert git_state(tmp_path)["is_modified"] is True
    (tmp_path / "inside").mkdir()
    assert git_state(tmp_path / "inside") is None
