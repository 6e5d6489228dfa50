"""A helper answers calls in a process of its own; those that are left fail with its end."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from pentad.core.specs import load
from pentad.runtime import process
from pentad.runtime.helper import END, Descriptor, Died, Helper, HelperPool, memory_file

TARGET = f"{__name__}:serve"


def serve(channel):
    """Runs in the process."""
    while (asked := channel.receive()) is not END:
        number, what, *given = asked
        if what == "event":
            channel.send((None, given))
        channel.answer(number, ANSWERS[what], *given)


def read(fd):
    return os.fdopen(fd, "rb").read()


def unreadable():
    return Unreadable()


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def of_two(*said):
    raise OfTwo(*said)


class OfTwo(Exception):
    """Is pickled, and cannot be read."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def with_a_lock():
    error = ValueError("has a lock")
    error.lock = threading.Lock()
    raise error


def of_a_file(path):
    load(f"{path}:fail")()


def fork():
    if (pid := os.fork()) == 0:
        time.sleep(600)
    return pid


ANSWERS = {"sum": lambda *given: sum(given), "event": lambda *_: None, "read": read}
ANSWERS |= {"divide": lambda a, b: a / b, "lock": threading.Lock, "exit": os._exit}
ANSWERS |= {
    "sleep": time.sleep,
    "pid": os.getpid,
    "unreadable": unreadable,
    "of two": of_two,
    "with a lock": with_a_lock,
    "of a file": of_a_file,
    "fork": fork,
    "leave": sys.exit,
    "path": lambda: sys.path,
}


@pytest.fixture
def helper():
    one = Helper("the adder", TARGET)
    yield one
    one.close(0)


def test_calls_are_answered_with_results_exceptions_and_events(helper):
    events = []
    helper.on_event = events.append
    calls = [helper.call("sum", *range(n)) for n in (3, 100_000)]
    assert [call.result(60) for call in calls] == [3, sum(range(100_000))]
    assert isinstance(helper.call("divide", 1, 0).exception(60), ZeroDivisionError)
    assert helper.call("event", 1, "b").result(60) is None and events == [[1, "b"]]
    assert helper.call("pid").result(60) == helper.child.pid != os.getpid()
    helper.close()
    assert helper.child.code == 0 and helper.wait(0)


def test_descriptors_of_files_are_sent(helper):
    with memory_file() as file:
        file.write(b"abc")
        file.seek(0)
        assert helper.call("read", Descriptor(file.fileno())).result(60) == b"abc"


def test_the_end_of_the_process_fails_its_calls_in_words(helper):
    calls = [helper.call("sleep", 600), helper.call("sum", 1)]
    helper.child.send(signal.SIGKILL)
    for call in calls:
        with pytest.raises(Died, match=r"the adder was ended by signal 9 \(SIGKILL\)"):
            call.result(60)
    with pytest.raises(Died, match="the adder was ended by signal 9"):
        helper.call("sum", 1).result(60)
    helper.tell(END)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("exit", 3), "ended with exit code 3"),
        (("leave", 3), "ended with exit code 1"),
        (("lock",), "ended with exit code 1"),
        (("unreadable",), "a message of it cannot be read .*no number"),
    ],
)
def test_an_answer_that_does_not_come_is_not_waited_for(helper, asked, words):
    with pytest.raises(Died, match=words):
        helper.call(*asked).result(60)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("of two", "a", "b"), "OfTwo: a and b"),
        (("with a lock",), "ValueError: has a lock"),
        (("of a file",), "Own: said"),
    ],
)
def test_an_exception_that_cannot_be_read_here_arrives_in_words(helper, tmp_path, asked, words):
    if asked == ("of a file",):
        (tmp_path / "own.py").write_text(
            "class Own(Exception): ...\ndef fail(): raise Own('said')\n"
        )
        asked += (str(tmp_path / "own.py"),)
    with pytest.raises(RuntimeError, match=words):
        helper.call(*asked).result(60)
    assert helper.call("sum", 1).result(60) == 1, "the process lives"


def test_a_fork_of_the_process_does_not_hide_its_end(helper):
    fork = psutil.Process(helper.call("fork").result(60))
    call = helper.call("sleep", 600)
    helper.child.send(signal.SIGKILL)
    with pytest.raises(Died, match="the adder was ended by signal 9"):
        call.result(60)
    psutil.wait_procs([fork], timeout=60)
    assert not fork.is_running()


def test_a_message_for_which_no_file_can_be_opened_is_not_waited_for(helper):
    assert helper.call("sum", 1).result(60) == 1
    call, held = helper.call("sleep", 0.5), []
    max_fds = len(list(Path("/dev/fd").iterdir())) + 8
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_fds, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.dup(0))
        with pytest.raises(Died, match="a message of it cannot be read .*Too many open files"):
            call.result(60)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_stopped_process_holds_up_no_caller_and_is_killed_when_it_stalls():
    helper = Helper("the adder", TARGET, stall_s=1.0)
    assert helper.call("sum", 1).result(60) == 1
    helper.child.send(signal.SIGSTOP)
    began = time.monotonic()
    call = helper.call("sum", *range(1_000_000))  # more than the buffer of a socket
    assert time.monotonic() - began < 30.0
    with pytest.raises(Died, match=r"it wrote nothing for stall_abort_s = 1 s"):
        call.result(60)


def test_calls_that_take_longer_than_close_waits_fail(helper):
    call = helper.call("sleep", 600)
    helper.close(0.1)
    with pytest.raises(Died, match="was ended by signal 9"):
        call.result(60)


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_process_that_does_not_end_when_killed_is_not_waited_for(monkeypatch, is_closed):
    """As one in uninterruptible sleep, for whose system call a signal waits."""
    helper = Helper("the adder", TARGET, stall_s=None if is_closed else 1.0)
    assert helper.call("sum", 1).result(60) == 1

    def deliver(pid, number, send):
        if pid != helper.child.pid or number != signal.SIGKILL:
            send(pid, number)

    with monkeypatch.context() as patched:
        for name in ("kill", "killpg"):
            patched.setattr(os, name, partial(deliver, send=getattr(os, name)))
        patched.setattr(process, "KILLED_S", 0.5)
        began, call = time.monotonic(), helper.call("sleep", 600)
        if is_closed:
            helper.close(0.1)
        with pytest.raises(Died, match="and has not ended 0.5 s later: a disk, a network file s"):
            call.result(60)
        helper.close()
        assert time.monotonic() - began < 30.0
        with pytest.raises(Died):  # not sent
            helper.call("sum", 1).result(0)
        assert not helper.child.is_running
    os.kill(helper.child.pid, signal.SIGKILL)
    helper.child.popen.wait()


def test_it_imports_what_its_parent_can(helper):
    """This module is on no path of a new interpreter."""
    assert set(filter(None, sys.path)) <= set(helper.call("path").result(60))


@pytest.mark.usefixtures("started_warm")
def test_a_pool_runs_functions_and_names_how_a_process_was_lost():
    pool = HelperPool(2)
    own = os.getpid()
    found = [pool.submit(os.getppid), pool.submit(divmod, 7, 2), pool.submit(int, "10", base=2)]
    assert [future.result(60) for future in found] == [own, (3, 1), 2]
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(60)
    with pytest.raises(Died, match="a worker process ended with exit code 3"):
        pool.submit(os._exit, 3).result(60)
    pool.submit(time.sleep, 600)
    pool.shutdown(cancel_futures=True)
    assert not any(helper.child.is_running for helper in pool.helpers)


PARENT = """
import sys, time
from pentad.runtime.helper import Helper
helper = Helper("the adder", {target!r})
assert helper.call("sum", 1).result(60) == 1
print(helper.child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("started_warm")
def test_it_ends_with_its_parent():
    code = f"import sys; sys.path[:] = {sys.path!r}\n" + PARENT.format(target=TARGET)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        helper = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, _ = psutil.wait_procs([helper], timeout=60)
    assert gone
