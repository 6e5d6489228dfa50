"""Reads all memory of its own process and looks for the marks of other samples in it."""

import ctypes
import errno
import gc
import json  # noqa: F401  # for the programs that this file is the beginning of
import os
import re
from pathlib import Path

MARK = re.compile(b"LE[F]T-([a-z]+)-1234567[8]")  # the pattern is no mark itself
PAGE = os.sysconf("SC_PAGE_SIZE")
CHUNK = 16 * PAGE


def quote(completion, answer):
    """A reward with a result that holds its arguments."""
    return {"value": 1.0, "parts": {completion[:200] + answer[:200]: 1.0}}


def marks_in_memory(held=""):
    """By /proc, all mappings of the process, but for those that the allocator has returned since
    the list was read: they hold nothing any more."""
    found = set()
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("rb", 0) as memory:
        for line in maps.read().splitlines():
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            if " r" not in line or "[v" in line:
                continue
            for start in range(first, last, CHUNK):
                memory.seek(start)
                try:
                    found |= marks(memory.read(min(CHUNK + 64, last - start)))
                except OSError as error:
                    if error.errno != errno.EIO:
                        raise
    return sorted(found)


def marks_in_reach():
    """Without /proc: the pages around all objects and what they refer to (strings are wherever the
    allocator found room), the heap and the stack, read by a pipe, which refuses addresses that are
    not mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = libc.write.restype = ctypes.c_ssize_t
    pipe = os.pipe()
    seen, found = set(), set()

    def page(address):
        return libc.write(pipe[1], ctypes.c_void_p(address), ctypes.c_size_t(PAGE)) == PAGE

    def walk(address, step):
        while address not in seen and page(address):
            seen.add(address)
            found.update(marks(os.read(pipe[0], PAGE)))
            address += step

    environ = ctypes.c_void_p.in_dll(libc, "environ").value
    objects = gc.get_objects()
    places = {id(thing) for thing in objects}
    places.update(id(thing) for thing in gc.get_referents(*objects))
    for place in [*places, environ, libc.sbrk(0) - 1, id(None), id(os.environ)]:
        start = place - place % PAGE
        walk(start, PAGE)
        walk(start - PAGE, -PAGE)
    return sorted(found)


def marks(data):
    return {match.group(1).decode() for match in MARK.finditer(data)}
