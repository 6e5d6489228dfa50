"""What `make test` and `.ci/run` call, and how they end; the programs only note their arguments."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HERE = "not full and (not ray or smoke)"
SITE = ["setup-site", "site"]
REST = ["test-ray", "test-runs", "test-wheel"]


def program(path: Path, fails: str) -> Path:
    """A program that writes its arguments beside itself; with certain ones it fails."""
    path.parent.mkdir(exist_ok=True)
    lines = ["#!/bin/sh", f'echo "$*" >> {path}.calls', "echo closing line of $*"]
    path.write_text("\n".join([*lines, f'case "$*" in {fails}) exit 1;; esac\n']))
    path.chmod(0o755)
    return path


def run(*command, **environment):
    of_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")  # where a make runs these tests
    outer = {k: v for k, v in os.environ.items() if k not in of_make}
    return subprocess.run(
        command, cwd=ROOT, env={**outer, **environment}, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize(
    ("fails", "ends_well"), [("none", True), ("*'not dist'*", False), ("*' dist and'*", False)]
)
def test_distributed_tests_run_also_where_the_others_fail(tmp_path, fails, ends_well):
    python = program(tmp_path / "bin" / "python", fails)
    for stamp in (".installed", ".installed-tests"):
        (tmp_path / stamp).touch()
    done = run("make", "test", f"VENV={tmp_path}")
    beside, others = sorted((python.parent / "python.calls").read_text().splitlines())
    assert "-m not dist" in others and beside == f"-m pytest -m dist and {HERE}"
    assert (done.returncode == 0) == ends_well
    assert done.stdout.splitlines()[-1] == f"closing line of -m pytest -m dist and {HERE}"


@pytest.mark.parametrize(
    ("fails", "left_out"),
    [
        ("none", []),
        *(("setup-megatron", ["test-megatron"]), ("setup-site", ["site"])),
        *((name, []) for name in ("check", "test-megatron", "site", "test", "chaos", *REST)),
    ],
)
def test_ci_runs_what_can_be_installed_whatever_fails(tmp_path, fails, left_out):
    make = program(tmp_path / "bin" / "make", fails)
    done = run(ROOT / ".ci" / "run", PATH=f"{make.parent}:{os.environ['PATH']}")
    first, *calls = (make.parent / "make.calls").read_text().split()
    before, after = calls[: calls.index("test")], calls[calls.index("test") + 1 :]
    expected = {"check", "setup-megatron", "test-megatron", *SITE} - set(left_out)
    assert (first, set(before), set(after)) == ("setup-tests", expected, {"chaos", *REST})
    assert len(calls) == len(set(calls))
    assert (done.returncode == 0) == (fails == "none" or bool(left_out))
    assert ("its tests are left out" in done.stdout) == (fails == "setup-megatron")
    assert ("the site is not built" in done.stdout) == (fails == "setup-site")
    *_, closing, told = done.stdout.splitlines()
    assert closing == "closing line of chaos"
    assert re.fullmatch(r"\.ci/run: make chaos took \d+ s", told)
