"""Jobs that misbehave in every way we know. Run only inside the pool, never by hand."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path


def fine(x):
    return {"x": x, "pid": os.getpid()}


def loop():
    while True:
        pass


def fork_bomb():
    while True:
        os.fork()


def crash():
    ctypes.string_at(0)


def flood():
    return "x" * (2 << 20)


def hanging_import():
    Path("hangs.py").write_text("import time\nwhile True:\n    time.sleep(1)\n")
    sys.path.insert(0, ".")
    __import__("hangs")


def leave():
    os._exit(0)


def close_everything():
    os.closerange(0, 4096)
    return 1.0


def ignore_signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


def eat_memory():
    held = []
    while True:
        held.append(bytes(32 << 20))


def raise_exit():
    sys.exit("no thanks")


def recurse():
    return recurse()


def bounded_bomb():
    """Forks at most 600 times: enough to show that it is stopped, harmless if it were not."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"x" * 600)
    while True:
        os.read(read_end, 1)
        os.fork()


def daemon(path):
    """Leaves a process behind that has left session, group and parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(path).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not Path(path).exists() or not Path(path).read_text():
        time.sleep(0.005)
    return 1.0


def sleep(path, seconds):
    Path(path).write_text(str(os.getpid()))
    time.sleep(seconds)
    return 1.0


async def wait(x):
    return x + 1


def write_files():
    for _ in range(50):
        os.mkdir("d")  # noqa: PTH102
        os.chdir("d")
    os.mkdir("closed", 0)  # noqa: PTH102
    return 1.0


KINDS = {
    "loop": "timeout",
    "fork_bomb": "error",
    "crash": "crash",
    "flood": "output",
    "hanging_import": "timeout",
    "leave": "crash",
    "close_everything": "crash",
    "ignore_signals": "timeout",
    "eat_memory": "memory",
    "raise_exit": "error",
}
"""How each ends where processes may not be started."""
