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
socket 41 198           io_uring_setup 425 425  pidfd_getfd 438 438     bpf 321 280
ptrace 101 117          process_vm_readv 310 270                        process_vm_writev 311 271
tkill 200 130           rt_sigqueueinfo 129 138 rt_tgsigqueueinfo 297 240
pidfd_send_signal 424 424
chmod 90 -              fchmod 91 52            fchmodat 268 53         fchmodat2 452 452
chown 92 -              fchown 93 55            lchown 94 -             fchownat 260 54
utime 132 -             utimes 235 -            futimesat 261 -         utimensat 280 88
setxattr 188 5          lsetxattr 189 6         fsetxattr 190 7
removexattr 197 14      lremovexattr 198 15     fremovexattr 199 16
shmget 29 194           semget 64 190           msgget 68 186           mq_open 240 180
add_key 248 217         request_key 249 218     keyctl 250 219          userfaultfd 323 282
unshare 272 97          setns 308 268
"""
"""What a program nobody has read has no business with: sockets, other processes' memory and
signals, rights and times of files, shared memory that outlives it, keys, namespaces."""
ARGUED = "clone 56 220  clone3 435 435  kill 62 129  tgkill 234 131"

ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
"""Column in the tables above, and the kernel's name for the architecture."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
NUMBER_AT, ARCH_AT, FIRST_ARGUMENT_AT = 0, 4, 16
CLONE_THREAD, X32_BIT = 0x10000, 0x40000000

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
    lines += _only_if(argued["clone"], (ANY_BIT, 1, 0, CLONE_THREAD))
    for name in ("kill", "tgkill") if isolate else ():
        lines += _only_if(argued[name], (EQUAL, 1, 0, os.getpid()))
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _only_if(number: int, test: Line) -> list[Line]:
    """This system call is allowed only if its first argument passes the test."""
    return [
        (EQUAL, 0, 4, number),
        (LOAD, 0, 0, FIRST_ARGUMENT_AT),
        test,
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
