"""Memory that a job has the kernel hold for it is bounded as its own is."""

import asyncio

from pentad.rewards.sandbox import MIB, JobFailed, Sandbox
from pentad.rewards.section import RewardConfig

RUN = "pentad.rewards.calls:print_output"
SPARSE = """
import ctypes, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
place, held = 1 << 40, 0
while True:
    where, size = ctypes.c_void_p(place), ctypes.c_size_t(4096)
    got = libc.mmap(where, size, 3, 0x100022, -1, ctypes.c_long(0))
    if got in (None, 2**64 - 1): break
    ctypes.memset(got, 1, 1)
    place += 1 << 30
    held += 1
print(held, flush=True)
time.sleep(3)
print("held")
"""
SOCKETS = """
import socket
pairs, total = [], 0
try:
    while True: pairs.append(socket.socketpair())
except OSError: pass
for pair in pairs:
    for end in pair:
        try: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        except OSError: pass
        end.setblocking(False)
        try:
            while True: total += end.send(bytes(4096))
        except OSError: pass
print(total)
"""
INFLIGHT = """
import socket
a, b = socket.socketpair()
socket.send_fds(a, [b"x"], [b.fileno()])
print("sent")
"""


def run_program(source: str, **changes) -> object:
    async def run():
        reward = RewardConfig(num_workers=1, timeout_s=60.0, memory_mb=300, **changes)
        pool = Sandbox(reward, [RUN], isolate=True)
        await pool.start()
        try:
            given = {"source": source, "stdin": ""}
            return await pool.run(RUN, given, capture="stdout")
        finally:
            await pool.close()

    return asyncio.run(run())


def test_page_tables_of_sparse_memory_count_as_memory():
    ended = run_program(SPARSE)
    assert isinstance(ended, JobFailed) and ended.kind == "memory", ended


def test_sockets_hold_little_and_no_files_under_way():
    assert int(run_program(SOCKETS)) < 64 * MIB
    assert run_program(INFLIGHT) == JobFailed("error", "exit code 1")


def test_dense_memory_up_to_the_limit_is_not_refused():
    assert run_program("x = bytes(200 << 20)\nprint(len(x))").strip() == str(200 << 20)
