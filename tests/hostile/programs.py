"""Hostile programs, as source text. Each prints GOT and its name if it reached what it wanted.

`VICTIM` is the number of a process of the same user outside, `FILE` a file that it may write to,
`PORT` a port that listens, `SEGMENT` a shared memory segment, `NUMBERS` those of system calls by
their names.
"""

import random

HEAD = """
import ctypes, fcntl, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):  # other failures than a refusal show that it was let in
    if libc.syscall(NUMBERS.get(name, -1), *arguments) < 0 and ctypes.get_errno() == 1:
        raise PermissionError
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
call('process_vm_readv', VICTIM, place, 1, place, 1, 0)
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
    "datagram to a socket with a name": """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b"x", "\\0pentad-datagrams-" + str(PORT))
""",
    "datagram of a raw socket to a path": """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)
a.connect(os.path.join(os.path.dirname(FILE), "socket"))
a.send(b"x")
""",
    "pair of another family": "call('socketpair', 30, 1, 0, bytes(8))",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "fork": "os.fork()",
    "exec": "os.execv('/bin/echo', ['echo', 'GOT'])",
    "new namespace": "call('unshare', 0x10000000)",
    "shared memory": "call('shmget', 0, 1 << 20, 0o1600)",
    "shared memory of others": "call('shmat', SEGMENT, None, 0)",
    "removing shared memory": "call('shmctl', SEGMENT, 0, None)",
    "semaphores of others": "call('semctl', 0, 0, 0, 0)",
    "queues of others": "call('msgctl', 0, 0, None)",
    "removing a queue": "call('mq_unlink', b'pentad-%d' % PORT)",
    "extended attributes": """
value = ctypes.create_string_buffer(b"x")
given = struct.pack("QII", ctypes.addressof(value), 1, 0)
if libc.syscall(463, -100, os.__file__.encode(), 0, b"user.pentad", given, 16) < 0: raise OSError
""",
    "attributes of files": """
if libc.syscall(469, -100, FILE.encode(), bytes(24), 24, 0) < 0: raise OSError
""",
    "flags of files": """
file = os.open(os.__file__, os.O_RDONLY)
fcntl.ioctl(file, 0x80086601, flags := bytearray(8))
fcntl.ioctl(file, 0x40086602, flags)
""",
    "lock of a library": "fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)",
    "sync": "call('sync')",
    "syncfs": "call('syncfs', os.open(os.__file__, os.O_RDONLY))",
    "kernel log": "call('syslog', 3, bytes(4096), 4096)",
    "all asynchronous I/O": "call('io_setup', 1024, ctypes.byref(ctypes.c_ulong()))",
    "all timers": "call('timer_create', 0, None, ctypes.byref(ctypes.c_int()))",
    "memory in pipes": "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
    "memory held by pipes": """
page = ctypes.create_string_buffer(4096)
call('vmsplice', os.pipe()[1], struct.pack('QQ', ctypes.addressof(page), 4096), 1, 0)
""",
    "memory by memfd": """
held = []
for _ in range(20):
    f = os.memfd_create("x")
    os.posix_fallocate(f, 0, 60 << 20)
    held.append(f)
""",
    "io_uring": "call('io_uring_setup', 8, bytes(120))",
    "threads": """
threading.stack_size(262144)
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
NUM_SYSCALLS = 480


def random_program(rng: random.Random) -> str:
    """Some break-outs, some system calls drawn at random, and an ending."""
    steps = [rng.choice(list(BREAK_OUTS.values())) for _ in range(rng.randint(0, 2))]
    for _ in range(rng.randint(0, 8)):
        words = ["VICTIM", "-1", "0", "1", "FILE.encode()", "bytes(4096)", str(rng.getrandbits(31))]
        given = ", ".join(rng.choice(words) for _ in range(6))
        steps.append(f"libc.syscall({rng.randrange(NUM_SYSCALLS)}, {given})")
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
