"""A system call filter: what a job may not ask of the kernel. Linux, standard library only.

The filter is classic BPF (https://docs.kernel.org/userspace-api/seccomp_filter.html); it needs no
privileges, holds for every thread, and cannot be taken off again.
"""

from __future__ import annotations

import errno
import os
import struct

# name, number on x86_64, number on aarch64 (- where there is none)
SPAWN = """
fork 57 -               vfork 58 -              execve 59 221           execveat 322 281
"""
REACH_OUT = """
socket 41 198           io_uring_setup 425 425  pidfd_open 434 434      pidfd_getfd 438 438
ptrace 101 117          process_vm_readv 310 270                        process_vm_writev 311 271
tkill 200 130           rt_sigqueueinfo 129 138 rt_tgsigqueueinfo 297 240
pidfd_send_signal 424 424                       setpriority 141 140     ioprio_set 251 30
sched_setparam 142 118  sched_setscheduler 144 119                      sched_setattr 314 274
sched_setaffinity 203 122                       migrate_pages 256 238   move_pages 279 239
chmod 90 -              fchmod 91 52            fchmodat 268 53         fchmodat2 452 452
chown 92 -              fchown 93 55            lchown 94 -             fchownat 260 54
utime 132 -             utimes 235 -            futimesat 261 -         utimensat 280 88
setxattr 188 5          lsetxattr 189 6         fsetxattr 190 7
removexattr 197 14      lremovexattr 198 15     fremovexattr 199 16
shmget 29 194           semget 64 190           msgget 68 186           mq_open 240 180
memfd_create 319 279    memfd_secret 447 447    userfaultfd 323 282     bpf 321 280
inotify_init 253 -      inotify_init1 294 26    fanotify_init 300 262   perf_event_open 298 241
add_key 248 217         request_key 249 218     keyctl 250 219
unshare 272 97          setns 308 268
"""
"""What a program nobody has read has no business with: sockets, other processes' memory, signals
and priorities, rights and times of files, memory that no limit counts, keys, namespaces."""
ARGUED = """
clone 56 220            clone3 435 435          kill 62 129             tgkill 234 131
prlimit64 302 261       prctl 157 167           fcntl 72 25             ioctl 16 29
"""

ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
"""Column in the tables above, and the kernel's name for the architecture."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
CLONE_THREAD, X32_BIT, PR_SET_PDEATHSIG = 0x10000, 0x40000000, 1
SET_OWNER = {"fcntl": (8, 15, 1024, 1026), "ioctl": (0x8901, 0x8902)}
"""F_SETOWN, F_SETOWN_EX, F_SETLEASE, F_NOTIFY; FIOSETOWN, SIOCSPGRP: signals by way of a file."""

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
        (AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, REFUSE),
    ]
    for number in refused.values():
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    # clone3 hides its flags in memory; told that it does not exist, libc falls back to clone.
    lines += [(EQUAL, 0, 1, argued["clone3"]), (RETURN, 0, 0, UNKNOWN)]
    lines += _only_if(argued["clone"], 0, (ANY_BIT, CLONE_THREAD))
    if isolate:
        for name, value in (("kill", os.getpid()), ("tgkill", os.getpid()), ("prlimit64", 0)):
            lines += _only_if(argued[name], 0, (EQUAL, value))
        lines += _unless(argued["prctl"], 0, (PR_SET_PDEATHSIG,))
        for name, values in SET_OWNER.items():
            lines += _unless(argued[name], 1, values)
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _only_if(number: int, argument: int, test: tuple[int, int]) -> list[Line]:
    """This system call is allowed only if the low word of that argument passes the test."""
    operation, value = test
    return [
        (EQUAL, 0, 4, number),
        (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument),
        (operation, 1, 0, value),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]


def _unless(number: int, argument: int, values: tuple[int, ...]) -> list[Line]:
    """This system call is refused if the low word of that argument is one of the values."""
    lines: list[Line] = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)]
    for value in values:
        lines += [(EQUAL, 0, 1, value), (RETURN, 0, 0, REFUSE)]
    lines.append((RETURN, 0, 0, ALLOW))
    return [(EQUAL, 0, len(lines), number), *lines]
