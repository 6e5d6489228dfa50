"""Namespaces of an isolated worker, which hide the machine's processes, network and files.

Linux only, standard library only. The worker has separate user, process, network, IPC and mount
namespaces; each job has a separate process namespace below that, and an empty folder in memory.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from pentad.rewards.confine import (
    LIBC,
    Limits,
    check,
    die_with_parent,
    prefer_for_oom,
    readable_paths,
)

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    *(0x00020000, 0x04000000, 0x08000000),
    *(0x10000000, 0x20000000, 0x40000000),
)
NOSUID, NODEV, BIND, DETACH, RECURSIVE, PRIVATE = 2, 4, 4096, 2, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
NOBODY = 65534
"""The user of jobs that root starts."""
MAX_REASON = 1000
STAGING, SCRATCH = "/tmp", "/scratch"
"""An existing folder in which the new root is built; and the new root's only writable folder."""
MAX_FILES = 4096
PARENT_CHECK_MS = 1000


class Enclosure:
    """Prepares each job in the first process of a worker's namespaces."""

    def __init__(self, limits: Limits) -> None:
        self.max_bytes = limits.max_file_bytes
        self.namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        _show_only(readable_paths())

    def open_scratch(self) -> str:
        """Makes the next fork the first process of a new namespace; returns its empty folder."""
        check(LIBC.setns(self.namespace, NEWPID))
        check(LIBC.unshare(NEWPID))
        options = f"size={self.max_bytes},nr_inodes={MAX_FILES},mode=777"
        _mount("tmpfs", SCRATCH, NOSUID | NODEV, options)
        return SCRATCH

    def close_scratch(self) -> None:
        check(LIBC.umount2(SCRATCH.encode(), DETACH))


def enclose(limits: Limits) -> Enclosure:
    """Returns in a new process, the first in its namespaces, whose processes are all killed when it
    ends. The calling process waits for it and ends with it, or gets an OSError if namespaces are
    not permitted."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            try:
                return _enter(limits, theirs)
            except OSError as failure:
                theirs.send(f"-{failure}".encode())
                os._exit(1)
        theirs.close()
        if ours.recv(1) == b"u":
            _write_maps(child)
            ours.send(b"m")
        reply = ours.recv(MAX_REASON)
    if reply == b"+":
        _end_with(child)
    os.waitpid(child, 0)
    raise OSError(reply.decode(errors="replace").removeprefix("-"))


def _enter(limits: Limits, caller: socket.socket) -> Enclosure:
    """Enters the namespaces through an intermediate process, because a process namespace starts
    with the next child."""
    die_with_parent()
    check(LIBC.unshare(NEWUSER | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWNS))
    caller.send(b"u")
    if caller.recv(1) != b"m":
        os._exit(1)
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    die_with_parent()
    prefer_for_oom()
    made = Enclosure(limits)
    caller.send(b"+")
    return made


def _write_maps(child: int) -> None:
    """Maps our own user, and for root a second one: the kernel does not count the threads of
    root."""
    ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    if os.getuid() != 0:
        Path(f"/proc/{child}/setgroups").write_text("deny")
    for name, own in ids.items():
        also = f"\n{NOBODY} {NOBODY} 1" if os.getuid() == 0 and own != NOBODY else ""
        Path(f"/proc/{child}/{name}").write_text(f"{own} {own} 1{also}")


def leave_root() -> None:
    """Continues a job of root as the user `nobody`, unless Python was installed for root only."""
    paths = map(Path, (os.__file__, *readable_paths()))
    if os.getuid() == 0 and all(path.stat().st_mode & stat.S_IROTH for path in paths):
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _end_with(child: int) -> NoReturn:
    """Waits for the child; kills it if our own parent ends before."""
    parent, watch = os.getppid(), select.poll()
    watch.register(os.pidfd_open(child), select.POLLIN)
    while os.getppid() == parent and not watch.poll(PARENT_CHECK_MS):
        pass
    sys.exit()


def _show_only(paths: Iterable[str]) -> None:
    """Replaces the file system by an empty one with only these paths, read-only, and a scratch
    folder."""
    _mount("none", "/", RECURSIVE | PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in paths}  # some may be below STAGING
    _mount("tmpfs", STAGING, NOSUID | NODEV, "size=1m,mode=755")
    os.chdir(STAGING)
    for path, descriptor in sources.items():
        source, target = f"/proc/self/fd/{descriptor}", Path(f".{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir() if Path(source).is_dir() else target.touch()
        _mount(source, str(target), BIND | RECURSIVE)
        os.close(descriptor)
    Path(f".{SCRATCH}").mkdir()
    check(LIBC.pivot_root(b".", b"."))
    check(LIBC.umount2(b".", DETACH))
    os.chdir("/")
    attributes = struct.pack("QQQQ", READ_ONLY | NOSUID, 0, 0, 0)
    place = (ctypes.c_int(AT_FDCWD), b"/", AT_RECURSIVE)
    check(LIBC.syscall(MOUNT_SETATTR, *place, attributes, ctypes.c_size_t(len(attributes))))


def _mount(source: str, target: str, flags: int, options: str = "") -> None:
    kind = b"tmpfs" if source == "tmpfs" else None
    words = (source.encode(), target.encode(), kind, ctypes.c_ulong(flags))
    check(LIBC.mount(*words, options.encode() or None))
