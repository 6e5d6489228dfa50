"""How a process ended can be asked at any time, also after it was ended and by several threads."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pentad.core.errors import RunError
from pentad.runtime.group_calls import RankGroup
from pentad.runtime.local_roles import LocalRuntime
from pentad.runtime.process import Child
from pentad_tools.chaos.spares import Fork


def sleeper() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def forked() -> Fork:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    return Fork(pid)


@pytest.mark.parametrize("start", [sleeper, forked])
def test_the_code_is_known_after_the_process_was_ended(start):
    """Of one that nobody asked before: its number is the system's again."""
    process = Child(start())
    os.kill(process.pid, signal.SIGKILL)
    process.end()
    assert process.code == -signal.SIGKILL and not process.is_running
    process.send(signal.SIGTERM)
    process.end()
    assert process.code == -signal.SIGKILL


def test_a_stopped_process_without_a_session_of_its_own_is_ended():
    """A fork may be stopped before it has made one: then no signal to the session reaches it."""
    process = Child(sleeper())
    process.send(signal.SIGSTOP)
    ending = threading.Thread(target=process.end, daemon=True)
    ending.start()
    ending.join(10)
    is_ended = not ending.is_alive()
    process.send(signal.SIGKILL)
    assert is_ended and process.code == -signal.SIGKILL


def test_the_code_is_known_while_another_thread_ends_the_process():
    for _ in range(5):
        process, failures, done = Child(sleeper()), [], threading.Event()

        def ask(process=process, failures=failures, done=done):
            while not done.is_set():
                try:
                    process.code  # noqa: B018
                except BaseException as error:
                    failures.append(error)
                    return

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        process.send(signal.SIGKILL)
        process.end()
        done.set()
        for thread in threads:
            thread.join()
        assert failures == [] and process.code == -signal.SIGKILL


def test_a_group_whose_watch_fails_is_not_used_any_more():
    """And the exception is not left to the event loop, which prints it when the task is freed."""

    async def run() -> RankGroup:
        group = RankGroup(LocalRuntime(), [], stall_s=1.0)

        async def watch() -> None:
            raise ChildProcessError(10, "No child processes")

        watching = asyncio.create_task(watch())
        watching.add_done_callback(group._note_watch_ended)
        await asyncio.wait([watching])
        await asyncio.sleep(0)
        group.loop.close()
        return group

    with pytest.raises(RunError, match="the ranks are not monitored any more: ChildProcessError"):
        asyncio.run(run()).check()
