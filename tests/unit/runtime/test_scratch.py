"""Temporary folders of programs that were killed are removed at a later start, and only those."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pentad.core import scratch
from pentad.core.scratch import scratch_folder

CODE = """\
import time
from pentad.core.scratch import scratch_folder
with scratch_folder("pentad-test-") as folder:
    (folder / "board").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_that_never_got_its_name_is_removed_when_it_is_old(tmp_path, monkeypatch):
    unnamed = tmp_path / ".pentad-test-x"
    unnamed.mkdir()
    (unnamed / scratch.OWNER).touch()
    with scratch_folder("pentad-test-"):
        assert unnamed.exists(), "its owner may be about to lock it"
    monkeypatch.setattr(scratch, "YOUNG_S", 0.0)
    with scratch_folder("pentad-test-"):
        assert not unnamed.exists()


def test_what_a_killed_program_left_is_removed_and_what_lives_stays(tmp_path):
    """At once, however young it is: a run that is killed is started again within seconds."""
    others = [
        subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    (killed, left), (living, kept) = [(one, one.stdout.readline().strip()) for one in others]
    foreign = tmp_path / "pentad-test-foreign"
    foreign.mkdir()  # it has no lock: none of ours
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert Path(left).exists()
        with scratch_folder("pentad-test-") as own:
            names = {entry.name for entry in tmp_path.iterdir()}
        assert names == {own.name, Path(kept).name, foreign.name}
        assert not own.exists()
    finally:
        living.kill()
        living.wait()


def test_what_a_program_left_that_was_killed_just_now_is_removed(tmp_path):
    """However young it is: it was written to a moment ago."""
    one = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    left = Path(one.stdout.readline().strip())
    one.kill(), one.wait()
    (left / "published").write_text("x")
    with scratch_folder("pentad-test-"):
        assert not left.exists()
