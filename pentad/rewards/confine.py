"""Confinement of one job: resource limits, access to files, system calls.

Linux only, standard library only: this runs in worker processes that must start in milliseconds. No
privileges are needed. `breakout.py` tests the protections. The system call filter is classic BPF
(https://docs.kernel.org/userspace-api/seccomp_filter.html); it applies to every thread and cannot
be removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
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

# name, number on x86_64, number on aarch64 (- where there is none)
SPAWN = """
fork 57 -               vfork 58 -              execve 59 221           execveat 322 281
"""
REACH_OUT = """
socket 41 198           io_uring_setup 425 425  pidfd_open 434 434      pidfd_getfd 438 438
ptrace 101 117          process_vm_readv 310 270                        process_vm_writev 311 271
tkill 200 130           rt_sigqueueinfo 129 138 rt_tgsigqueueinfo 297 240
pidfd_send_signal 424 424                       timer_create 222 107    kcmp 312 272
setpriority 141 140     ioprio_set 251 30       sched_setparam 142 118  sched_setscheduler 144 119
sched_setattr 314 274   sched_setaffinity 203 122                       flock 73 32
migrate_pages 256 238   move_pages 279 239      sync 162 81             syncfs 306 267
chmod 90 -              fchmod 91 52            fchmodat 268 53
chown 92 -              fchown 93 55            lchown 94 -             fchownat 260 54
utime 132 -             utimes 235 -            futimesat 261 -         utimensat 280 88
setxattr 188 5          lsetxattr 189 6         fsetxattr 190 7
removexattr 197 14      lremovexattr 198 15     fremovexattr 199 16
shmget 29 194           shmat 30 196            shmctl 31 195           mq_open 240 180
semget 64 190           semop 65 193            semctl 66 191           semtimedop 220 192
msgget 68 186           msgsnd 69 189           msgrcv 70 188           msgctl 71 187
mq_unlink 241 181       memfd_create 319 279    memfd_secret 447 447    io_setup 206 0
splice 275 76           tee 276 77              vmsplice 278 75         userfaultfd 323 282
inotify_init 253 -      inotify_init1 294 26    fanotify_init 300 262   perf_event_open 298 241
add_key 248 217         request_key 249 218     keyctl 250 219          syslog 103 116
unshare 272 97          setns 308 268           bpf 321 280
setsockopt 54 208       sendmsg 46 211          sendmmsg 307 269
landlock_create_ruleset 444 444                 landlock_add_rule 445 445
"""
"""System calls that an untrusted program does not need: sockets, other processes' memory,
signals, priorities, locks and queues, rights and times of files, memory that no limit counts
(in buffers of sockets, in files passed between them, in rules), resources of the whole machine,
keys, namespaces."""
ARGUED = """
clone 56 220            clone3 435 435          kill 62 129             tgkill 234 131
prlimit64 302 261       prctl 157 167           fcntl 72 25             ioctl 16 29
socketpair 53 199
"""

ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
"""Column in the tables above, and the kernel's name of the architecture."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
X32_BIT, NEWER = 0x40000000, 452
"""Numbers from here on belong to another interface or are newer than the tables above."""

Instruction = tuple[int, int, int, int]
"""Instruction: operation, lines to skip if true, lines to skip if false, value."""


def numbers(table: str, column: int) -> dict[str, int]:
    words = table.split()
    rows = [words[i : i + 3] for i in range(0, len(words), 3)]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def build_filter(*, isolate: bool) -> bytes:
    """Builds a filter that blocks new processes; with `isolate` also all calls that affect other
    processes."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call filter is known for {machine}")
    column, arch = ARCHITECTURES[machine]
    argued = numbers(ARGUED, column)
    refused = numbers(SPAWN + (REACH_OUT if isolate else ""), column)
    lines: list[Instruction] = [
        (LOAD, 0, 0, ARCH_AT),
        (EQUAL, 1, 0, arch),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, NEWER if isolate else X32_BIT),
        (RETURN, 0, 0, UNKNOWN),
    ]
    for number in refused.values():
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    # clone3 has its flags in memory; if it is blocked as missing, libc falls back to clone.
    lines += [(EQUAL, 0, 1, argued["clone3"]), (RETURN, 0, 0, UNKNOWN)]
    for name, argument, is_allowed, operation, value in _rules(isolate):
        lines += [
            (EQUAL, 0, 4, argued[name]),
            (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument),
            (operation, int(is_allowed), int(not is_allowed), value),
            (RETURN, 0, 0, REFUSE),
            (LOAD, 0, 0, NUMBER_AT),
        ]
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _rules(isolate: bool) -> list[tuple[str, int, bool, int, int]]:
    """Returns rules: system call, argument, whether the call is allowed or blocked if the low word
    of that argument passes the test, the test."""
    clone_thread, pr_set_pdeathsig = 0x10000, 1
    rules = [("clone", 0, True, ANY_BIT, clone_thread)]
    if not isolate:
        return rules
    # Signals through a file (F_SETOWN, F_SETOWN_EX, F_SETLEASE, F_NOTIFY), and F_SETPIPE_SZ.
    rules += [("fcntl", 1, False, EQUAL, command) for command in (8, 15, 1024, 1026, 1031)]
    return [
        *rules,
        ("kill", 0, True, EQUAL, os.getpid()),
        ("tgkill", 0, True, EQUAL, os.getpid()),
        ("prlimit64", 0, True, EQUAL, 0),
        ("prctl", 0, False, EQUAL, pr_set_pdeathsig),
        # Only queries of an open file (TCGETS, FIONREAD): others change owners and flags.
        ("ioctl", 1, True, AT_LEAST, 0x5400),
        ("ioctl", 1, False, AT_LEAST, 0x5500),
        # Event loops need a stream pair; datagrams could be sent to any socket of the machine.
        ("socketpair", 0, True, EQUAL, socket.AF_UNIX),
        ("socketpair", 1, False, ANY_BIT, 0xF & ~socket.SOCK_STREAM),
    ]


PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
CLOSE_RANGE = 436
KILL_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of one job."""

    isolate: bool = False
    """For untrusted programs: no network, no processes, no signals, own files only."""
    allow_processes: bool = False
    """Whether jobs may start processes."""
    max_processes: int = 32
    """Maximum number of processes at once, if they are allowed."""
    max_memory_bytes: int = 1 << 30
    """Address space of each process of a job."""
    max_threads: int = 64
    """Maximum number of threads of an isolated job."""
    max_file_bytes: int = 64 << 20
    """Maximum size of a file; with isolate, of all files of a job together."""
    max_result_bytes: int = 1 << 20
    allow_weaker: bool = False
    """Whether to continue without protections that this machine lacks."""


PAGE_TABLE_SHARE = 16
"""Page tables may take 1/16 of the memory limit in addition: 32 times the need of dense memory."""
WHERE_PYTHON_IS = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Variables of the run that a worker of isolated jobs receives and its jobs do not."""
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
    """Makes this process, instead of init, the parent of processes whose parent has ended."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def resume_after_parent() -> None:
    """Continues this process when its parent ends, which may have stopped it in `end_all`."""
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def close_all_but(*kept: int) -> None:
    """Closes every open file except the standard streams and `kept`."""
    bounds = [2, *sorted(kept), 1 << 32]
    for first, last in ((low + 1, high - 1) for low, high in itertools.pairwise(bounds)):
        if first <= last:
            check(LIBC.syscall(CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), 0))


# --- one job ---------------------------------------------------------------------------------


def apply(limits: Limits, scratch: str, cpu_s: int, *, is_enclosed: bool = False) -> None:
    """Confines this process permanently. Raises OSError if a protection is not available."""
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
    """Makes the kernel's out-of-memory killer prefer a job over the run. Only a preference: some
    containers do not allow it, and an enclosed job without /proc inherits it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _set_rlimits(limits: Limits, cpu_s: int, is_enclosed: bool) -> None:
    bounds = {
        resource.RLIMIT_AS: limits.max_memory_bytes,
        resource.RLIMIT_FSIZE: limits.max_file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu_s,
    }
    # Counted in the user's namespace (kernel 5.14), where only the worker is another process.
    # Elsewhere it counts all tasks of this user, and none for root: the warden counts too.
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


def page_table_bytes(watch: int) -> int:
    """Size of the page tables of the process behind this descriptor; 0 when it has ended."""
    try:
        told = Path(f"/proc/self/fdinfo/{watch}").read_text()
        pid = int(told.partition("\nPid:")[2].split()[0])
        status = Path(f"/proc/{pid}/status").read_text() if pid > 0 else ""
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = status.partition("\nVmPTE:")[2].split()
    return int(found[0]) << 10 if found else 0


# --- files -----------------------------------------------------------------------------------

SYSTEM = {
    *("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd"),
    *("/etc/nsswitch.conf", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"),
}
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ_FILE, WRITE_FILE, READ_DIR = 1 << 2, 1 << 1, 1 << 3
RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}


def readable_paths() -> list[str]:
    """Paths that an isolated job may read: Python, its installed packages, the system's
    libraries."""
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    wanted = {*SYSTEM, f"{sys.base_prefix}/lib", str(Path(os.__file__).parent), *packages}
    found: list[str] = []
    for path in sorted(filter(os.path.exists, wanted)):
        if not any(path.startswith(f"{folder}/") for folder in found):
            found.append(path)
    return found


def _restrict_files(scratch: str) -> None:
    """Restricts files by Landlock (kernel 5.13) if a worker cannot be enclosed: the same files are
    readable."""
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
    """Returns every process below `root`, including zombies."""
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
    """Kills all processes below `root`, except `keep`; stops all of them first, so that none
    escapes. If the caller is `root`, it has adopted all orphans, which are reaped here."""
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
            with contextlib.suppress(ChildProcessError):  # not our child yet: its parent ends too
                os.waitpid(pid, os.WNOHANG)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
