"""What the kernel is asked to forbid a job: memory, files, processes, network, signals.

Linux only, standard library only: this runs in worker processes that must start in milliseconds.
Nothing here needs privileges. Each protection is applied by `apply` and tried out by `missing`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pentad.rollout.seccomp import build_filter

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
KILL_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one job may use."""

    isolate: bool = False
    """For programs nobody has read: no network, no processes, no signals, own files only."""
    allow_processes: bool = False
    """Whether jobs may start processes."""
    max_processes: int = 32
    """Most of them at once, if they may."""
    max_memory_bytes: int = 1 << 30
    """Address space of each process of a job."""
    max_file_bytes: int = 64 << 20
    max_result_bytes: int = 1 << 20
    allow_weaker: bool = False
    """Goes on without the protections that this machine does not offer."""


LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _prctl(option: int, *arguments: object) -> None:
    padded = [*arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments))]
    _check(LIBC.prctl(ctypes.c_int(option), *padded))


def adopt_orphans() -> None:
    """Processes whose parent is gone become children of this one, not of init."""
    _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


# --- one job ---------------------------------------------------------------------------------


def apply(limits: Limits, scratch: str, cpu_s: int) -> None:
    """Confines this process for good. Raises OSError if a protection is not to be had.

    `cpu_s` is a last resort for the case that nobody is left to watch the clock.
    """
    _set_rlimits(limits, cpu_s)
    # The kernel's out-of-memory killer shall choose a job before it chooses the run. That is a
    # preference and no protection: some containers do not let it be set.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if limits.allow_processes:
        return
    steps: list[Callable[[], None]] = [lambda: _prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1))]
    if limits.isolate:
        steps += [_drop_capabilities, lambda: _hide_files(scratch)]
    steps.append(lambda: _install_filter(isolate=limits.isolate))
    for step in steps:
        with contextlib.suppress(OSError) if limits.allow_weaker else contextlib.nullcontext():
            step()


def missing(limits: Limits, scratch: str) -> list[str]:
    """The protections that do not hold in this process, found by trying to break them."""
    if limits.allow_processes:
        return []
    attempts: dict[str, Callable[[], object]] = {"processes": _try_fork}
    if limits.isolate:
        outside = Path(scratch).parent / f"{Path(scratch).name}-outside"
        attempts["network"] = lambda: socket.socket(socket.AF_INET).close()
        attempts["signals"] = lambda: os.kill(os.getppid(), 0)
        attempts["reading files"] = lambda: list(Path("/proc").iterdir())
        attempts["writing files"] = lambda: outside.write_text("")
    held = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except PermissionError:
            held.append(name)
    return [name for name in attempts if name not in held]


def _try_fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def _set_rlimits(limits: Limits, cpu_s: int) -> None:
    bounds = {
        resource.RLIMIT_AS: limits.max_memory_bytes,
        resource.RLIMIT_FSIZE: limits.max_file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu_s,
    }
    if limits.isolate:
        bounds[resource.RLIMIT_NOFILE] = 128
    if limits.allow_processes:
        # Counted over everything of this user, and not at all for root: the warden counts too.
        bounds[resource.RLIMIT_NPROC] = _num_tasks_of_user() + limits.max_processes
    for kind, bound in bounds.items():
        hard = resource.getrlimit(kind)[1]
        value = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (value, value))


def _num_tasks_of_user() -> int:
    total = 0
    for folder in _process_folders():
        with contextlib.suppress(OSError):  # processes end while we look
            if folder.stat().st_uid == os.getuid():
                total += sum(1 for _ in (folder / "task").iterdir())
    return total


def _process_folders() -> list[Path]:
    return [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _drop_capabilities() -> None:
    """Root's powers go; the user id stays, so that a Python under /root can still be read."""
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    _check(LIBC.capset(header, bytes(24)))


# --- files: Landlock (kernel 5.13) -----------------------------------------------------------

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ_FILE, WRITE_FILE, READ_DIR, EXECUTE = 1 << 2, 1 << 1, 1 << 3, 1 << 0
RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/nsswitch.conf")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def _hide_files(scratch: str) -> None:
    """Only Python and the system may be read, only `scratch` may be written."""
    abi = _check(LIBC.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    handled = RIGHTS_BY_ABI[min(abi, max(RIGHTS_BY_ABI))]
    ruleset = _check(LIBC.syscall(CREATE_RULESET, struct.pack("Q", handled), ctypes.c_size_t(8), 0))
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    readable = {*SYSTEM_FOLDERS, f"{sys.base_prefix}/lib", str(Path(os.__file__).parent), *packages}
    rights = dict.fromkeys(readable, READ_FILE | READ_DIR | EXECUTE)
    rights |= dict.fromkeys(SYSTEM_FILES, READ_FILE)
    rights |= dict.fromkeys(DEVICES, READ_FILE | WRITE_FILE)
    rights[scratch] = handled
    for path, allowed in rights.items():
        if not Path(path).exists():
            continue
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed & handled, folder)
        _check(LIBC.syscall(ADD_RULE, ruleset, 1, rule, 0))
        os.close(folder)
    _check(LIBC.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


# --- processes, network, signals --------------------------------------------------------------


def _install_filter(*, isolate: bool) -> None:
    program = build_filter(isolate=isolate)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    _prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.c_char_p(header))


# --- ending what a job started ---------------------------------------------------------------


def descendants(root: int) -> set[int]:
    """Every process below `root`, zombies included."""
    children: dict[int, list[int]] = {}
    for folder in _process_folders():
        with contextlib.suppress(OSError):  # processes end while we look
            parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found


def end_all(root: int, keep: Iterable[int] = (), *, with_root: bool = False) -> None:
    """Kills everything below `root`, except `keep`; stops it all first, so that none gets away.

    A caller that is `root` itself has adopted all orphans, and reaps them here.
    """
    stopped: set[int] = {root} if with_root else set()
    _signal(stopped, signal.SIGSTOP)
    while fresh := descendants(root) - stopped - set(keep):
        _signal(fresh, signal.SIGSTOP)
        stopped |= fresh
    _signal(stopped, signal.SIGKILL)
    if with_root:
        return
    deadline = time.monotonic() + KILL_PATIENCE_S
    while left := descendants(root) - set(keep):
        if time.monotonic() > deadline:
            raise OSError(f"processes {sorted(left)} do not end")
        _signal(left, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # not ours yet: its parent is dying too
                os.waitpid(pid, os.WNOHANG)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
