"""Servers that a run starts: their last words, their end, and what they see of our packages."""

import ast
import asyncio
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pentad.core.errors import InfraFailure, RunError, UserError
from pentad.samplers.process import ServerProcess, check_installed


@pytest.fixture
def start(tmp_path):
    started = []

    def run(code):
        command = [sys.executable, "-c", textwrap.dedent(code)]
        process = ServerProcess("vllm-0", command, dict(os.environ), tmp_path / "logs" / "s.log")
        started.append(process)
        return process

    yield run
    for process in started:
        asyncio.run(process.stop())


async def never():
    raise InfraFailure("nobody answers")


def test_a_server_that_ends_is_quoted(start):
    process = start("print('no such model'); raise SystemExit(3)")
    with pytest.raises(RunError, match="vllm-0 ended with exit code 3; .*s.log: no such model"):
        asyncio.run(process.wait_ready(never, 120))


def test_a_server_that_never_answers_is_given_up(start):
    process = start("import time; time.sleep(600)")
    with pytest.raises(RunError, match="vllm-0 was not ready after 0.3 s \\(nobody answers\\)"):
        asyncio.run(process.wait_ready(never, 0.3))


def test_stop_ends_what_the_server_started(start, tmp_path):
    child = tmp_path / "child"
    process = start(f"""
        import subprocess, sys, time
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        started = subprocess.Popen([sys.executable, "-c", code])
        open({str(child)!r}, "w").write(str(started.pid))
        time.sleep(600)
    """)
    pid = number_in(child)
    asyncio.run(process.stop())
    assert is_gone(pid)


def test_a_server_ends_with_a_run_that_is_killed(tmp_path):
    told = tmp_path / "pid"
    code = f"""
        import os, sys, time
        from pathlib import Path
        from pentad.samplers.process import ServerProcess
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        process = ServerProcess("s", command, dict(os.environ), Path({str(tmp_path / "log")!r}))
        time.sleep(1)
        Path({str(told)!r}).write_text(str(process.child.pid))
        time.sleep(600)
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    pid = number_in(told)
    run.kill()
    run.wait()
    assert is_gone(pid)


def test_a_server_sees_this_package_and_none_of_our_others(start):
    code = "import os, sys, pentad; print(pentad.__file__, os.listdir(sys.path[1]), flush=True)"
    process = start(f"{code}\nimport time; time.sleep(600)")
    deadline = time.monotonic() + 30
    while not (said := process.log_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    seen = ast.literal_eval(said[said.index("[") :])
    assert sorted(seen) == ["pentad", "pentad_server.dist-info"]  # the second names a plugin


def number_in(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return int(path.read_text())


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or ") Z" in stat.read_text():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\nexec sleep 60\n", "its interpreter .*/python did not answer within 0.2 s"),
        ("no program", "/python cannot be run .Exec format error."),
        ("#!/nowhere/python\n", "/python cannot be run .No such file or directory."),
    ],
)
def test_an_interpreter_that_cannot_be_asked_is_one_sentence(tmp_path, monkeypatch, text, said):
    python = tmp_path / "python"
    python.write_text(text)
    python.chmod(0o700)
    monkeypatch.setattr("pentad.samplers.process.INSTALLED_S", 0.2)
    with pytest.raises(UserError, match=f"rollout.server.python = .*{said}"):
        check_installed(str(python), "vllm", str(python))
