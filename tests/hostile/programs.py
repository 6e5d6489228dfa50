"""Hostile programs, as source text. Each prints GOT and its name if it reached what it wanted.

`VICTIM` is the number of a process of the same user outside, `FILE` a file that it may write to,
`PORT` a port that listens, `NUMBERS` those of system calls by their names.
"""

import random

HEAD = """
import ctypes, fcntl, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    if libc.syscall(NUMBERS[name], *arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""

SIGNAL = """
r, w = os.pipe()
fcntl.fcntl(r, fcntl.{command}, {value})
fcntl.fcntl(r, 10, signal.SIGKILL)
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
os.write(w, b"x")
"""
BREAK_OUTS = {
    "signal by F_SETOWN": SIGNAL.format(command="F_SETOWN", value="VICTIM"),
    "signal to a group by F_SETOWN": SIGNAL.format(command="F_SETOWN", value="-VICTIM"),
    "signal by F_SETOWN_EX": SIGNAL.replace("fcntl.{command}", "15").format(
        value="struct.pack('ii', 1, VICTIM)"
    ),
    "signal by FIOSETOWN": """
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8901, struct.pack("i", VICTIM))
fcntl.fcntl(a, 10, signal.SIGKILL)
fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC)
b.send(b"x")
""",
    "kill": "os.kill(VICTIM, signal.SIGKILL)",
    "tgkill": "call('tgkill', VICTIM, VICTIM, 9)",
    "pidfd": "call('pidfd_send_signal', os.pidfd_open(VICTIM), 9, None, 0)",
    "file size of others": "resource.prlimit(VICTIM, resource.RLIMIT_FSIZE, (0, 0))",
    "open files of others": "resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (3, 3))",
    "priority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "priority of the group": "os.setpriority(os.PRIO_PGRP, VICTIM, 19)",
    "cores": "os.sched_setaffinity(VICTIM, {0})",
    "idle": "os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))",
    "death with the parent": "call('prctl', 1, 0, 0, 0, 0)",
    "ptrace": "call('ptrace', 16, VICTIM, 0, 0)",
    "memory of others": """
size = ctypes.sizeof(ctypes.c_long)
place = (ctypes.c_long * 2)(ctypes.addressof(ctypes.create_string_buffer(size)), size)
try:
    call('process_vm_readv', VICTIM, place, 1, place, 1, 0)
except OSError as failure:
    if failure.errno != 14: raise  # it was let in, and found nothing at that address
""",
    "truncate": "os.truncate(FILE, 0)",
    "open and truncate": "os.open(FILE, os.O_RDONLY | os.O_TRUNC)",
    "truncate a library": "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "write a library": "os.open(os.__file__, os.O_WRONLY)",
    "read": "open(FILE).read()",
    "write": "open(FILE, 'a')",
    "unlink": "os.unlink(FILE)",
    "rename": "open('x', 'w'); os.rename('x', FILE)",
    "link": "os.link(FILE, 'x')",
    "list": "os.listdir(os.path.dirname(FILE))",
    "processes": "os.listdir('/proc/%d' % VICTIM)",
    "environment": "open('/proc/self/environ').read()",
    "names by inotify": "f = libc.inotify_init1(0)\n"
    "d = os.path.dirname(FILE).encode()\n"
    "if f < 0 or libc.inotify_add_watch(f, d, 0x100) < 0: raise OSError",
    "names by dnotify": "fcntl.fcntl(os.open('/', os.O_RDONLY), 1026, 4)",
    "network": "socket.create_connection(('127.0.0.1', PORT), 1)",
    "unix socket": "socket.socket(socket.AF_UNIX).connect('\\0pentad-' + str(PORT))",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "fork": "os.fork()",
    "exec": "os.execv('/bin/echo', ['echo', 'GOT'])",
    "new namespace": "call('unshare', 0x10000000)",
    "shared memory": "call('shmget', 0, 1 << 20, 0o1600)",
    "memory by memfd": """
held = []
for _ in range(20):
    f = os.memfd_create("x")
    os.posix_fallocate(f, 0, 60 << 20)
    held.append(f)
""",
    "io_uring": "call('io_uring_setup', 8, bytes(120))",
    "threads": """
threading.stack_size(65536)
stop = threading.Event()
for _ in range(1000):
    threading.Thread(target=stop.wait, daemon=True).start()
""",
    "files without end": """
for i in range(10):
    f = os.open(str(i), os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(f, 0, 50 << 20)
    os.close(f)
""",
    "number of files": "for i in range(5000): os.mkdir(str(i))",
}

TOO_MUCH = {"files without end", "number of files"}
"""What is not held without namespaces."""
STUBBORN = """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
"""
ENDINGS = [
    "pass",
    "raise ValueError('\\x1b[2J\\r\\nforged: line')",
    "sys.exit(3)",
    "os._exit({n})",
    "os.kill(os.getpid(), {n})",
    "os.abort()",
    "ctypes.string_at(0)",
    "while True: pass",
    "time.sleep(99)",
    "sys.setrecursionlimit(10**6)\nf = lambda: f()\nf()",
    "os.write(1, b'x' * (3 << 20))",
    "held = [bytes(32 << 20) for _ in range(99)]",
    "os.closerange(0, 99)",
    "print('\\ud800')",
    "os.write(1, bytes(range(256)))",
    STUBBORN,
]
VALUES = [
    "10**400",
    "-(10**400)",
    "10**5000",
    "float('nan')",
    "float('inf')",
    "[[[[]]]] * 3",
    "nested(60)",
    "nested(900)",
    "nested(5000)",
    "'\\ud800'",
    "'\\x1b]0;title\\x07'",
    "'x' * (2 << 20)",
    "{1: 2}",
    "{(1, 2): 3}",
    "{'\\x1b': 1.0}",
    "{'value': 10**400, 'parts': {}}",
    "{None: 1, True: 2}",
    "b'bytes'",
    "object()",
    "iter([])",
    "True",
    "-0.0",
    "1e-400",
    "{'a': 1e308, 'b': 1e308}",
]
CALLABLE = """
def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value
def f():
    return {value}
"""
SYSCALLS = [n for n in range(450) if n not in (162, 306)]
"""All but sync and syncfs, which would only make the machine slow."""


def random_program(rng: random.Random) -> str:
    """Some break-outs, some system calls drawn at random, and an ending."""
    steps = [rng.choice(list(BREAK_OUTS.values())) for _ in range(rng.randint(0, 2))]
    for _ in range(rng.randint(0, 8)):
        words = ["VICTIM", "-1", "0", "1", "FILE.encode()", "bytes(4096)", str(rng.getrandbits(31))]
        given = ", ".join(rng.choice(words) for _ in range(6))
        steps.append(f"libc.syscall({rng.choice(SYSCALLS)}, {given})")
    rng.shuffle(steps)
    tried = [
        "try:\n"
        + "".join(f"    {line}\n" for line in step.strip().splitlines())
        # A job that broke its own files or threads goes on as it can.
        + "except Exception: pass"
        for step in steps
    ]
    ending = rng.choice(ENDINGS).format(n=rng.randint(1, 64))
    return "\n".join([HEAD, *tried, ending])
