"""Helper processes that run Pentad's code, such as the writer of checkpoints, and their channels.

`python -P -m pentad.runtime.helper TARGET FD PARENT` calls a function with one end of a socket
pair. A message is pickled into a memory file, whose descriptor is sent: it arrives complete or not
at all, and sending does not wait for a reader. Both ends run Pentad's code: values from user code
(rewards, environments) are never unpickled.
"""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from pentad.core.errors import Transient
from pentad.core.machine import flush_output
from pentad.core.specs import load
from pentad.runtime.process import FAILED, KILLED_S, Child, die_with_parent

T = TypeVar("T")

MAX_FDS = 250
END = None
"""The last message to a helper: finish the calls and exit."""


class Died(Transient):
    """A helper exited without an answer."""

    def __init__(self, text: str, pid: int = 0) -> None:
        """`pid`: that of the helper, which may be one of another process that raised this."""
        super().__init__(text)
        self.pid = pid


class Descriptor(int):
    """A file descriptor in a message: the receiver gets a duplicate."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.fds: list[int] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Descriptor):
            return None
        self.fds.append(value)
        return len(self.fds) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], fds: list[int]) -> None:
        super().__init__(file)
        self.fds = fds

    def persistent_load(self, number: Any) -> Descriptor:
        return Descriptor(self.fds[number])


class Raised:
    """Arrives as its exception, or as its words where that cannot be pickled or read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        words = "".join(traceback.format_exception_only(self.error)).strip()
        data = b""
        with suppress(Exception):
            data = pickle.dumps(self.error)
        return read_exception, (data, words)


def read_exception(data: bytes, words: str) -> Exception:
    try:
        error: Exception = pickle.loads(data)
    except Exception:  # its class, of a user's file, may be unknown here
        return RuntimeError(words)
    return error


def memory_file() -> IO[bytes]:
    """A file without a name, in memory on Linux."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("pentad"), "w+b")
    return tempfile.TemporaryFile()


class Channel:
    """One end of a socket pair; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: Any) -> None:
        """Raises ConnectionError if the other end is closed."""
        with memory_file() as file:
            pickler = _Pickler(file)
            pickler.dump(message)
            file.seek(0)
            assert len(pickler.fds) < MAX_FDS, "a message has few descriptors"
            socket.send_fds(self.sock, [b"."], [file.fileno(), *pickler.fds])

    def receive(self) -> Any:
        """Raises EOFError once the other end is closed."""
        try:
            data, fds, flags, _ = socket.recv_fds(self.sock, 1, MAX_FDS)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        if not fds or flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        with os.fdopen(fds[0], "rb") as file:
            return _Unpickler(file, fds[1:]).load()

    def answer(self, number: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Sends the result or the exception of a function as the answer to a call. If that fails,
        exits, so that the caller does not wait."""
        value, error = None, None
        try:
            try:
                value = function(*arguments)
            except Exception as raised:
                error = Raised(raised)
            self.send((number, value, error))
        except BaseException:
            traceback.print_exc()
            os._exit(FAILED)


def accept_channel(fd: str, parent: str) -> Channel:
    """Opens the other end in a process that `Child.connected` started."""
    die_with_parent(int(parent))
    os.set_inheritable(int(fd), False)
    sock = socket.socket(fileno=int(fd))
    os.register_at_fork(after_in_child=sock.close)  # a fork that outlives us would hide our end
    return Channel(sock)


class Helper:
    """The parent's handle of a helper process: calls from any thread, and its events. The helper
    ends with this process."""

    def __init__(
        self,
        name: str,
        target: str,
        *,
        on_event: Callable[[Any], None] | None = None,
        stall_s: float | None = None,
    ) -> None:
        """`name`, for errors; `target`: the function, as `module:name`. A process that has a call
        and neither reads nor writes for `stall_s` is killed; None: no limit."""
        self.name = name
        self.on_event = on_event
        paths = [str(Path(path).absolute()) for path in (*sys.path, str(Path(__file__).parents[2]))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-P", "-m", __name__, target]
        self.child, ours = Child.connected(command, environment=environment)
        self.channel = Channel(ours)
        self.calls: dict[int, Future[Any]] = {}
        self.numbers = itertools.count()
        self.guard = threading.RLock()
        self.lost = ""
        """Describes how it ended; empty while it may answer."""
        self.reader = threading.Thread(target=self._read, name="helper", daemon=True)
        self.reader.start()
        if stall_s is not None:
            threading.Thread(target=self._watch, args=(stall_s,), daemon=True).start()

    def call(self, *arguments: Any) -> Future[Any]:
        """Returns a future of the result or exception; Died if the process ends before."""
        future: Future[Any] = Future()
        with self.guard:
            if self.lost:
                future.set_exception(Died(self.lost, self.child.pid))
                return future
            number = next(self.numbers)
            self.calls[number] = future
            try:
                self.tell((number, *arguments))
            except BaseException:
                del self.calls[number]
                raise
        return future

    def tell(self, message: Any) -> None:
        """Sends a message without an answer."""
        with self.guard, suppress(ConnectionError):  # `_read` reports that it has ended
            if not self.lost:
                self.channel.send(message)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended and its messages are processed; False at the timeout."""
        self.reader.join(timeout_s)
        return not self.reader.is_alive()

    def close(self, timeout_s: float | None = None) -> None:
        """Waits for its calls, then ends it; calls that take longer than `timeout_s` fail."""
        self.tell(END)
        if not self.wait(timeout_s):
            self.end()
            self.wait()

    def end(self) -> None:
        """Kills it; its calls fail."""
        self.child.end()
        with suppress(OSError):  # a process that does not end keeps its end open
            self.channel.sock.shutdown(socket.SHUT_RDWR)

    def _watch(self, stall_s: float) -> None:
        self.child.end_when_stalled(stall_s, lambda: bool(self.calls))
        self.end()

    def _read(self) -> None:
        try:
            while True:
                number, value, *raised = self.channel.receive()
                if number is None:
                    if self.on_event is not None:
                        self.on_event(value)
                elif (error := raised[0]) is None:
                    self.calls.pop(number).set_result(value)
                else:
                    self.calls.pop(number).set_exception(error)
        except EOFError:
            self.child.wait(KILLED_S)
        except Exception as error:
            self.child.end(f"was ended: a message of it cannot be read ({error!r})")
        with self.guard:
            self.child.end()
            self.lost = f"{self.name} {self.child.ended()}"
            self.channel.sock.close()
            lost, self.calls = self.calls, {}
        for future in lost.values():
            future.set_exception(Died(self.lost, self.child.pid))


class HelperPool(ThreadPoolExecutor):
    """Runs functions in helper processes, which start with the first calls. Each thread has one."""

    def __init__(self, num: int) -> None:
        self.mine = threading.local()
        self.helpers: list[Helper] = []

        def start() -> None:
            self.mine.helper = Helper("a worker process", f"{__name__}:serve_functions")
            self.helpers.append(self.mine.helper)

        super().__init__(num, initializer=start)

    def submit(self, function: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        call = partial(function, *arguments, **named)
        return super().submit(lambda: self.mine.helper.call(call).result())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """With `cancel_futures`, calls in progress are ended too."""
        for helper in self.helpers if cancel_futures else ():
            helper.end()
        super().shutdown(wait, cancel_futures=cancel_futures)
        for helper in self.helpers:
            helper.close()


def serve_functions(channel: Channel) -> None:
    """Main loop of a process of `HelperPool`."""
    while (asked := channel.receive()) is not END:
        channel.answer(*asked)


def main(target: str, fd: str, parent: str) -> None:
    channel = accept_channel(fd, parent)
    with suppress(EOFError):
        load(target)(channel)
        flush_output()
        os._exit(0)  # threads may hang in a call that does not return
    os._exit(FAILED)  # the parent has ended


if __name__ == "__main__":
    from pentad.runtime import helper  # under the name by which both ends pickle its classes

    helper.main(*sys.argv[1:])
