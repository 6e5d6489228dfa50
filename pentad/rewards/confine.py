"""What one job may use and ask of the kernel: resource limits, rights to files, system calls.

Linux only, standard library only: this runs in worker processes that must start in milliseconds.
Nothing here needs privileges. `breakout.py` tries out whether it holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pentad.rewards.seccomp import build_filter

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
CLOSE_RANGE = 436
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
    max_threads: int = 64
    """Of an isolated job."""
    max_file_bytes: int = 64 << 20
    """The largest file; with isolate, all files of a job together."""
    max_result_bytes: int = 1 << 20
    allow_weaker: bool = False
    """Goes on without the protections that this machine does not offer."""


LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def prctl(option: int, first: int, second: object = None) -> None:
    rest = (second or ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    check(LIBC.prctl(ctypes.c_int(option), ctypes.c_ulong(first), *rest))


def adopt_orphans() -> None:
    """Processes whose parent is gone become children of this one, not of init."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def close_all_but(kept: int) -> None:
    """Every open file except the standard streams and `kept`, however high their numbers may be."""
    for first, last in ((3, kept - 1), (kept + 1, 0xFFFFFFFF)):
        if first <= last:
            check(LIBC.syscall(CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), 0))


# --- one job ---------------------------------------------------------------------------------


def apply(limits: Limits, scratch: str, cpu_s: int, *, is_enclosed: bool = False) -> None:
    """Confines this process for good. Raises OSError if a protection is not to be had.

    `cpu_s` is a last resort for the case that nobody is left to watch the clock.
    """
    _set_rlimits(limits, cpu_s, is_enclosed)
    prefer_for_oom()
    if limits.allow_processes:
        return
    steps: list[Callable[[], None]] = [lambda: prctl(PR_SET_NO_NEW_PRIVS, 1)]
    if limits.isolate:
        steps += [_drop_capabilities]
    if limits.isolate and not is_enclosed:
        steps += [lambda: _restrict_files(scratch)]
    steps.append(lambda: _install_filter(isolate=limits.isolate))
    for step in steps:
        with contextlib.suppress(OSError) if limits.allow_weaker else contextlib.nullcontext():
            step()


def prefer_for_oom() -> None:
    """The kernel's out-of-memory killer shall choose a job before it chooses the run.

    That is a preference and no protection: some containers do not let it be set, and an enclosed
    job, which has no /proc, inherits it.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _set_rlimits(limits: Limits, cpu_s: int, is_enclosed: bool) -> None:
    bounds = {
        resource.RLIMIT_AS: limits.max_memory_bytes,
        resource.RLIMIT_FSIZE: limits.max_file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu_s,
    }
    # Counted in the user's namespace (kernel 5.14): there, the worker is the only other one.
    # Outside of it over everything of this user, and not at all for root: the warden counts too.
    if limits.isolate:
        bounds[resource.RLIMIT_NOFILE] = 128
        others = 1 if is_enclosed else _num_tasks_of_user()
        bounds[resource.RLIMIT_NPROC] = others + limits.max_threads
    elif limits.allow_processes:
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
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    check(LIBC.capset(header, bytes(24)))


def _install_filter(*, isolate: bool) -> None:
    program = build_filter(isolate=isolate)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(header))


# --- files -----------------------------------------------------------------------------------

SYSTEM = {
    *("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd"),
    *("/etc/nsswitch.conf", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"),
}
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ_FILE, WRITE_FILE, READ_DIR = 1 << 2, 1 << 1, 1 << 3
RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}


def readable_paths() -> list[str]:
    """What an isolated job may read: Python, its installed packages, the system's libraries."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    wanted = {*SYSTEM, f"{sys.base_prefix}/lib", str(Path(os.__file__).parent), *packages}
    found: list[str] = []
    for path in sorted(filter(os.path.exists, wanted)):
        if not any(path.startswith(f"{folder}/") for folder in found):
            found.append(path)
    return found


def _restrict_files(scratch: str) -> None:
    """Landlock (kernel 5.13), where a worker cannot be enclosed: the same files, by refusal."""
    abi = check(LIBC.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    handled = RIGHTS_BY_ABI[min(abi, max(RIGHTS_BY_ABI))]
    ruleset = check(LIBC.syscall(CREATE_RULESET, struct.pack("Q", handled), ctypes.c_size_t(8), 0))
    for path in (*readable_paths(), scratch):
        allowed = READ_FILE | (READ_DIR if Path(path).is_dir() else 0)
        allowed |= WRITE_FILE if path.startswith("/dev/") else 0
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", handled if path == scratch else allowed, place)
        check(LIBC.syscall(ADD_RULE, ruleset, 1, rule, 0))
        os.close(place)
    check(LIBC.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


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
