"""A system call filter: what a job may not ask of the kernel. Linux, standard library only.

The filter is classic BPF (https://docs.kernel.org/userspace-api/seccomp_filter.html); it needs no
privileges, holds for every thread, and cannot be taken off again.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

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
"""
"""What a program nobody has read has no business with: sockets, other processes' memory, signals,
priorities, locks and queues, rights and times of files, memory that no limit counts, supplies of
the whole machine, keys, namespaces."""
ARGUED = """
clone 56 220            clone3 435 435          kill 62 129             tgkill 234 131
prlimit64 302 261       prctl 157 167           fcntl 72 25             ioctl 16 29
socketpair 53 199
"""

ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
"""Column in the tables above, and the kernel's name for the architecture."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
X32_BIT, NEWER = 0x40000000, 452
"""System calls from there on are of another interface, or younger than the tables above."""

Line = tuple[int, int, int, int]
"""Operation, lines to skip if true, lines to skip if false, value."""


def numbers(table: str, column: int) -> dict[str, int]:
    words = table.split()
    rows = [words[i : i + 3] for i in range(0, len(words), 3)]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def build_filter(*, isolate: bool) -> bytes:
    """Refuses new processes; with `isolate` also whatever reaches beyond the process itself."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call filter is known for {machine}")
    column, arch = ARCHITECTURES[machine]
    argued = numbers(ARGUED, column)
    refused = numbers(SPAWN + (REACH_OUT if isolate else ""), column)
    lines: list[Line] = [
        (LOAD, 0, 0, ARCH_AT),
        (EQUAL, 1, 0, arch),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (AT_LEAST, 0, 1, NEWER if isolate else X32_BIT),
        (RETURN, 0, 0, UNKNOWN),
    ]
    for number in refused.values():
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    # clone3 hides its flags in memory; told that it does not exist, libc falls back to clone.
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
    """System call, argument, whether it is allowed or refused if the low word of that argument
    passes the test, the test."""
    clone_thread, pr_set_pdeathsig = 0x10000, 1
    rules = [("clone", 0, True, ANY_BIT, clone_thread)]
    if not isolate:
        return rules
    # Signals by way of a file (F_SETOWN, F_SETOWN_EX, F_SETLEASE, F_NOTIFY), and F_SETPIPE_SZ.
    rules += [("fcntl", 1, False, EQUAL, command) for command in (8, 15, 1024, 1026, 1031)]
    return [
        *rules,
        ("kill", 0, True, EQUAL, os.getpid()),
        ("tgkill", 0, True, EQUAL, os.getpid()),
        ("prlimit64", 0, True, EQUAL, 0),
        ("prctl", 0, False, EQUAL, pr_set_pdeathsig),
        # Only what asks about an open file (TCGETS, FIONREAD): others change owners and flags.
        ("ioctl", 1, True, AT_LEAST, 0x5400),
        ("ioctl", 1, False, AT_LEAST, 0x5500),
        # Event loops need a pair of streams; datagrams can be sent to any socket of the machine.
        ("socketpair", 0, True, EQUAL, socket.AF_UNIX),
        ("socketpair", 1, False, ANY_BIT, 0xF & ~socket.SOCK_STREAM),
    ]
