"""Processes of a run, forked from one that has imported everything: most of a short run would be
the import of torch.

`install` gives `subprocess` a Popen that has commands such as `python -m pentad.runtime.role_host`
forked by a process with those modules. What is forked becomes a child of the caller as if the
caller had started it: its parent ends at once, and an orphan goes to the nearest subreaper.
"""

import atexit
import contextlib
import ctypes
import gc
import inspect
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from pathlib import Path

COMMANDS = ("pentad.runtime.role_host", "pentad.samplers.server_key", "pentad.runtime.helper")
COMMANDS += ("pentad.cli.main", "kill_lab")
LOOK = "from pentad.trainer.look import main; main()"
"""The end of the code by which `pentad plan` starts the process that reads a run's inputs."""
LEAVES = COMMANDS[:3]
"""The others start processes of their own."""
HEAVY = ("train", "sft", "pretrain", "serve", "eval")
"""The commands of `pentad` that import torch."""
STAND_IN = re.compile(rf"#!/bin/sh\nPYTHONPATH=(\S+) exec {re.escape(sys.executable)} ")
"""The interpreter in the environment of a stand-in for a server."""
READ_AT_IMPORT = ("CUDA", "LD_", "OMP", "MKL", "PYTHON", "TORCH", "TRITON")
"""Names that begin so are read when a process or a library starts; a command with others than
those of the process that forks is started in earnest."""
GIVEN_LATER = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED")
GIVEN_LATER += ("TORCHINDUCTOR_CACHE_DIR",)  # by torch itself, when its compiler is imported
GIVEN_LATER += ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE",)
OF_TORCHRUN = ("TORCHELASTIC_", "TORCH_NCCL_")
PLAIN = {"preexec_fn": None, "executable": None, "shell": False, "gid": None, "gids": None}
PLAIN |= {"uid": None, "umask": -1, "process_group": -1, "close_fds": True}
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WAIT_S = 120.0
ROOM = "." * 8000
"""In the command line of the process that forks: what it forks puts its own words there."""

cold = subprocess.Popen
environment_of_all: dict[str, str] | None = None
"""Set before the first test: what that test sets is not of the processes that others start."""
is_on = True
is_for_all = False


class Forker:
    """The process that forks, and the way to ask it."""

    def __init__(self, sock: socket.socket, environment: dict[str, str]) -> None:
        self.sock = sock
        self.environment = environment
        self.lock = threading.Lock()
        sock.settimeout(WAIT_S)

    def fork(self, job: dict, fds: list[int]) -> int:
        """The number of a new child of this process that does the job."""
        with self.lock:
            prctl(SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.sock, [json.dumps(job).encode()], fds)
                pid, sign = int(self.sock.recv(64)), self.sock.recv(64)
            finally:
                prctl(SET_CHILD_SUBREAPER, 0)
        assert sign == b"here", "what was forked did not become a child of this process"
        return pid

    def fits(self, environment: dict[str, str]) -> bool:
        names = {
            name
            for name in self.environment.keys() | environment.keys()
            if name.startswith(READ_AT_IMPORT)
            and name not in GIVEN_LATER
            and not name.startswith(OF_TORCHRUN)
        }
        return all(self.environment.get(name) == environment.get(name) for name in names)


forker: Forker | None = None


class WarmPopen(subprocess.Popen):
    """Popen, but for how the child of some commands is made."""

    def _execute_child(self, *given):
        names = list(inspect.signature(cold._execute_child).parameters)[1:]
        asked = dict(zip(names, given, strict=True))
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        words, environment, ends_with = unwrapped(asked["args"], environment)
        found = is_on and is_warm(words, asked) and get_forker()
        if not found or not found.fits(environment):
            return super()._execute_child(*given)
        ends = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        fds = [plain if end == -1 else end for plain, end in enumerate(ends)]
        passed = sorted(asked["pass_fds"])
        job = {
            "words": list(map(os.fspath, words)),
            "environment": environment,
            "folder": str(asked["cwd"] or Path.cwd()),
            "own_session": bool(asked["start_new_session"]),
            "targets": [0, 1, 2, *passed],
            "parent": os.getpid(),
            "ends_with": ends_with,
            "is_for_all": is_for_all,
        }
        self.pid = found.fork(job, [*fds, *passed])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))
        return None


def unwrapped(words, environment) -> tuple[list, dict[str, str], int]:
    """The command of a server's process (`samplers/process.py`) where its interpreter is a script
    around ours: what is executed in the end, with which environment, and the signal it asks for
    when its parent ends. Torchrun's are without their `-u`."""
    if list(words[:2]) == [
        sys.executable,
        "-P",
    ]:  # nothing is put first here
        return [words[0], *words[2:]], environment, 0
    if is_for_all and list(words[:2]) == [sys.executable, "-u"]:
        return [words[0], *words[2:]], environment | {"PYTHONUNBUFFERED": "1"}, 0
    if isinstance(words, str) or list(words[1:2]) != ["-c"] or words[0] != (*words, "")[3]:
        return words, environment, 0
    script = STAND_IN.match(Path(words[0]).read_text(errors="replace"))
    if script is None:
        return words, environment, 0
    return [sys.executable, *words[4:]], environment | {"PYTHONPATH": script[1]}, signal.SIGTERM


def is_warm(words, asked) -> bool:
    if isinstance(words, str) or words[0] != sys.executable or len(words) < 2:
        return False
    if not all(asked.get(k, v) == v for k, v in PLAIN.items()):
        return False
    if is_for_all and (words[1] in ("-m", "-c") or not words[1].startswith("-")):
        return True
    if words[1] == "-c" and words[2].endswith(LOOK):
        return True
    if words[1] != "-m" or words[2] not in COMMANDS:
        return False
    return words[2] != "pentad.cli.main" or words[3:4] in ([name] for name in HEAVY)


def install() -> None:
    if sys.platform != "linux":
        return
    subprocess.Popen = WarmPopen
    of_torchrun = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    if of_torchrun in sys.modules:
        sys.modules[of_torchrun].Popen = WarmPopen  # the name it has imported


def keep_environment() -> None:
    """Processes are forked with the environment that is set now."""
    global environment_of_all
    environment_of_all = dict(os.environ)


@contextlib.contextmanager
def cold_starts():
    """All processes are started in earnest meanwhile."""
    global is_on
    before, is_on = is_on, False
    try:
        yield
    finally:
        is_on = before


@contextlib.contextmanager
def warm_starts():
    """Any process of this interpreter is forked meanwhile."""
    global is_for_all
    before, is_for_all = is_for_all, True
    try:
        yield
    finally:
        is_for_all = before


@contextlib.contextmanager
def warm_starts_with(**variables):
    """Any process of this interpreter is forked meanwhile, from one that began with these variables
    of the environment: for those that a library reads when it is imported."""
    global forker, environment_of_all
    before = forker, environment_of_all
    forker, environment_of_all = None, {**(environment_of_all or os.environ), **variables}
    try:
        with warm_starts():
            yield
    finally:
        if forker is not None:
            forker.sock.close()  # it ends
        forker, environment_of_all = before


def get_forker() -> Forker:
    """Started when it is first needed."""
    global forker
    if forker is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(environment_of_all or os.environ)
        with theirs:
            cold(
                [sys.executable, __file__, str(theirs.fileno()), ROOM],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # nobody who reads ours waits for its end
                start_new_session=True,
            )
        ours.settimeout(WAIT_S * 4)
        assert ours.recv(64) == b"ready", "the process that forks did not start"
        forker = Forker(ours, environment)
    return forker


def nest() -> None:
    """In a process that was just forked: its own processes are forked too, by a copy of it."""
    global forker
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            ours.close()
            prctl(SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                run(*serve(theirs))
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(1)
    theirs.close()
    forker = Forker(ours, dict(os.environ))
    install()


# In the process that forks.


def preload() -> None:
    """What commands and roles import, also what they do not import before they need it."""
    import torch._dynamo  # noqa: F401 (by the first optimizer)
    import uvicorn  # noqa: F401

    import pentad.cli.runs
    import pentad.engine.transformers_model
    import pentad.runtime.rank_host
    import pentad.runtime.role_host
    import pentad.samplers.remote
    import pentad.trainer.pumps.scorers  # noqa: F401
    from pentad.data.tokenizer import load_tokenizer
    from pentad.data.toy import write_model

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model")
        load_tokenizer(Path(folder) / "model")


def serve(sock: socket.socket) -> tuple[dict, list[int]]:
    """Forks until nobody asks any more. Returns only in what was forked."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 20, 64)
        if not data:
            os._exit(0)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            for fd in fds:
                os.close(fd)
            continue
        if pid := os.fork():
            sock.send(str(pid).encode())
            os._exit(0)
        job = json.loads(data)
        until = time.monotonic() + WAIT_S
        while os.getppid() != job["parent"]:
            if time.monotonic() > until:
                os._exit(1)
            time.sleep(0.001)
        if job["own_session"]:
            os.setsid()  # before the caller, as with Popen, may signal its session
        sock.send(b"here")
        sock.close()
        for number, handler in before.items():
            signal.signal(number, handler)
        return job, fds


def run(job: dict, fds: list[int]) -> None:
    """Becomes the process of a job."""
    import numpy
    import torch

    place(fds, job["targets"])
    names = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    _, *words = job["words"]
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    here = str(Path(__file__).parent)
    rest = [path for path in sys.path if path not in (*names, *own, here, "")]
    first = job["folder"] if words[0] in ("-m", "-c") else str(Path(words[0]).resolve().parent)
    sys.path[:] = [first, *filter(None, own), *rest]
    rename(job["words"])
    is_at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8")  # noqa: SIM115, PTH123
    sys.stdout, sys.stderr = (writer(number, is_at_once) for number in (1, 2))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    numpy.random.seed()
    if job["ends_with"]:
        prctl(SET_PDEATHSIG, job["ends_with"])
    if words[0] != "-m" or words[1] not in LEAVES:
        nest()
    global is_for_all
    is_for_all = job["is_for_all"]
    code = 0
    try:
        execute(words)
    except SystemExit as end:
        code = end.code
    except Exception:
        traceback.print_exc()
        code = 1
    leave(code)


def execute(words: list[str]) -> None:
    """What the interpreter does with its arguments."""
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        # It stays imported as well: what it is pickled by is the module that others import.
        warnings.filterwarnings("ignore", ".*found in sys.modules after import", RuntimeWarning)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = words
        runpy.run_path(str(Path(words[0]).absolute()), run_name="__main__")


def leave(code: int | str | None) -> None:
    """As the interpreter does, but for taking down what the process that forks has imported."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def place(fds: list[int], targets: list[int]) -> None:
    """Puts what came under numbers of our own under those it had."""
    above = max(*targets, *fds) + 1
    for number, fd in enumerate(fds):
        os.dup2(fd, above + number)
    for fd in fds:
        os.close(fd)
    for number, target in enumerate(targets):
        os.dup2(above + number, target, inheritable=True)
        os.close(above + number)


def writer(number: int, is_at_once: bool) -> io.TextIOWrapper:
    raw = open(number, "wb", 0 if is_at_once else -1, closefd=False)  # noqa: SIM115, PTH123
    by_line = number == 2 or os.isatty(number)
    return io.TextIOWrapper(
        raw,
        encoding="utf-8",
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=by_line,
        write_through=is_at_once,
    )


def rename(words: list[str]) -> None:
    """Puts the words where who lists processes finds them."""
    with open("/proc/self/stat") as file:  # noqa: PTH123 (pathlib may be that of another system)
        fields = file.read().rpartition(") ")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end
    shown = b"".join(word.encode() + b"\0" for word in words)[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def prctl(what: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(what, value, 0, 0, 0) == 0, "prctl"


if __name__ == "__main__":
    asking = socket.socket(fileno=int(sys.argv[1]))
    preload()
    gc.collect()
    gc.freeze()
    asking.send(b"ready")
    run(*serve(asking))
