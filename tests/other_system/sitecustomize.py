"""Another system than Linux, as far as the package sees: no calls that Linux alone has, no /proc,
/sys and /dev/shm. The standard library and torch see the system as it is. Python imports it at its
start, where this folder is on the path: in a program and in all that it starts."""

import builtins
import errno
import io
import os
import signal
import sys
import types

MISSING = {
    os: "sched_getaffinity sched_setaffinity posix_fallocate posix_fadvise pidfd_open memfd_create "
    "waitid eventfd pipe2 fdatasync setns unshare getrandom copy_file_range splice",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo",
}
PLACES = ("/proc", "/sys", "/dev/shm")
LOOKING = ("pentad", "pathlib", "shutil", "tempfile")


class Elsewhere(types.ModuleType):
    """`sys`, on another platform."""

    def __getattribute__(self, name):
        return "darwin" if name == "platform" else getattr(sys, name)

    def __setattr__(self, name, value):
        setattr(sys, name, value)


def hidden(call):
    def without(path, *rest, **more):
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(PLACES):
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.split(".")[0] in LOOKING:
                raise FileNotFoundError(errno.ENOENT, "not of this system", os.fspath(path))
        return call(path, *rest, **more)

    return without


elsewhere, plain_import = Elsewhere("sys"), builtins.__import__


def importing(name, globals=None, *rest, **more):
    if name == "sys" and (globals or {}).get("__name__", "").split(".")[0] == "pentad":
        return elsewhere
    return plain_import(name, globals, *rest, **more)


for module in ("asyncio", "multiprocessing", "random", "selectors", "shutil", "subprocess"):
    plain_import(module)  # they ask at import what there is
builtins.__import__ = importing
for module, names in MISSING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
os.stat, os.open, io.open = hidden(os.stat), hidden(os.open), hidden(io.open)
