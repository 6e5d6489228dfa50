"""Connections between the processes of a run: frames over TCP, many concurrent calls.

Both ends authenticate with a shared token before the first frame (not over a socket pair), and
frames of another generation are rejected. Calls made in one turn of the event loop are sent in one
frame, and the other end starts all of them before any continues. Sizes, calls in progress, unread
answers and silence are bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from pentad.core.errors import DataFailure, InfraFailure, RunError, UserError
from pentad.runtime.awake import awake_s
from pentad.runtime.frames import (
    MAX_FRAME_BYTES,
    PLAIN,
    BadFrame,
    describe_error,
    pack,
    read_frame,
    revive_error,
)

log = logging.getLogger(__name__)

MAGIC = b"PENTAD1\n"
NONCE = 32
MAX_CALLS = 1 << 16
"""Maximum concurrent calls of a connection; with more unsent items the peer counts as dead."""
HANDSHAKE_S = 10.0
MAX_STRANGERS = 32
"""Maximum number of unauthenticated connections; beyond it the oldest is dropped."""
REFUSED = bytes(hashlib.sha256().digest_size)
"""Sent in place of the server's proof: the token is wrong, do not retry."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Pauses between attempts to connect, doubled each time."""
LOGGED_REFUSALS = 100
"""Beyond this number, rejections are logged only when their number has doubled, so that foreign
connections cannot fill the disk."""
STALL_S = 60.0
"""Time limit for the serving end to read a frame. The calling end has none: it may be suspended."""
CLOSE_S = 1.0

Serve = Callable[[str, dict[str, Any]], Coroutine[Any, Any, Any]]
"""Answers a call: method and arguments to a JSON value with arrays."""
OnEvent = Callable[[str, Any], None]


class Connection:
    """One end of an open connection: the listening end serves calls and emits events, the other end
    makes calls. Once the connection is lost, all calls raise InfraFailure with the reason."""

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        generation: int,
        *,
        serve: Serve | None = None,
        on_event: OnEvent | None = None,
        patience_s: float | None = None,
    ) -> None:
        """`name`: that of the other end. `patience_s`: maximum silence, if the other end sends
        heartbeats."""
        self.name = name
        self.reader = reader
        self.writer = writer
        self.generation = generation
        self.serve = serve
        self.on_event = on_event
        self.patience_s = patience_s
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Future of the reason for the loss of the connection."""
        self.heard_at = awake_s()
        self.numbers = itertools.count()
        self.pending: dict[int, asyncio.Future[Any]] = {}
        self.running: dict[int, asyncio.Task[None]] = {}
        """Calls of the other end that run here."""
        self.outbox: list[dict[str, Any]] = []
        self.has_mail = asyncio.Event()
        self.tasks = [asyncio.create_task(work()) for work in (self._read, self._write)]
        if patience_s is not None:
            self.tasks.append(asyncio.create_task(self._listen(patience_s)))

    async def call(self, method: str, /, **arguments: Any) -> Any:
        """Returns the result of the other end's method. Cancelling cancels it there too."""
        self._check_open()
        number = next(self.numbers)
        future = self.pending[number] = asyncio.get_running_loop().create_future()
        self._post({"call": number, "method": method, "arguments": arguments})
        try:
            return await future
        except asyncio.CancelledError:
            if number in self.pending and not self.lost.done():
                self._post({"cancel": number})
            raise
        finally:
            self.pending.pop(number, None)

    def emit(self, event: str, value: Any) -> None:
        """Sends an event; does nothing if the connection is lost."""
        if not self.lost.done():
            self._post({"event": event, "value": value})

    @property
    def is_behind(self) -> bool:
        """Whether the other end has unread data."""
        return bool(self.outbox)

    async def close(self, why: str = "it was closed here") -> None:
        self._lose(why)
        await asyncio.gather(*self.tasks, *self.running.values(), return_exceptions=True)
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.writer.wait_closed()
        except (OSError, EOFError, TimeoutError):  # the peer ended first, or does not read
            self.writer.transport.abort()

    def _check_open(self) -> None:
        if self.lost.done():
            raise InfraFailure(self._sentence())

    def _sentence(self) -> str:
        return f"{self.name}: the connection is lost: {self.lost.result()}"

    def _post(self, item: dict[str, Any]) -> None:
        if len(self.outbox) >= MAX_CALLS:
            self._lose(f"it has {len(self.outbox)} unread messages")
            return
        self.outbox.append(item)
        self.has_mail.set()

    def _lose(self, why: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(why)
        own = asyncio.current_task()
        for task in [*self.tasks, *self.running.values()]:
            if task is not own:
                task.cancel()
        for future in self.pending.values():
            if not future.done():
                future.set_exception(InfraFailure(self._sentence()))
        self.outbox.clear()
        self.writer.close()

    async def _write(self) -> None:
        try:
            while True:
                await self.has_mail.wait()
                self.has_mail.clear()
                await asyncio.sleep(0)  # callers that are ready add their calls to the frame
                while self.outbox:
                    self.writer.writelines(self._next_frame())
                    async with asyncio.timeout(STALL_S if self.serve is None else None):
                        await self.writer.drain()
        except TimeoutError:
            self._lose(f"it has read nothing for {STALL_S:g} s")
            self.writer.transport.abort()
        except OSError as error:
            self._lose(str(error) or type(error).__name__)

    def _next_frame(self) -> list[bytes | memoryview]:
        """Returns a frame of all waiting items, or as many as fit. An item that cannot be sent
        fails alone."""
        items, self.outbox = self.outbox, []
        try:
            parts = pack(self.generation, items)
            size = sum(len(part) for part in parts)
            if size <= MAX_FRAME_BYTES:
                return parts
            reason = f"a message of {size} bytes is longer than the {MAX_FRAME_BYTES} allowed"
        except (TypeError, ValueError, RecursionError) as error:
            reason = str(error)
        if len(items) > 1:
            half = len(items) // 2
            self.outbox = items[:half]
            parts = self._next_frame()
            self.outbox += items[half:]
            return parts
        return self._refuse(items[0], reason)

    def _refuse(self, item: dict[str, Any], reason: str) -> list[bytes | memoryview]:
        """Replaces an item that cannot be sent by an error for the caller."""
        if "answer" in item:
            described = describe_error(RunError(f"the answer cannot be sent: {reason}"))
            return pack(self.generation, [{"error": item["answer"], "reason": described}])
        future = self.pending.get(item.get("call", -1))
        if future is not None and not future.done():
            future.set_exception(RunError(f"{self.name}: {item['method']}: {reason}"))
        else:
            log.warning("%s: an event is not sent: %s", self.name, reason)
        return pack(self.generation, [])

    async def _read(self) -> None:
        try:
            while True:
                generation, items = await read_frame(self.reader)
                self.heard_at = awake_s()
                if generation != self.generation:
                    await self._refuse_generation(generation, items)
                    return
                for item in items:
                    self._take(item)
        except BadFrame as error:
            self._lose(f"a message {error}")
        except (OSError, EOFError) as error:
            is_end = isinstance(error, EOFError)
            self._lose("the other end is gone" if is_end else str(error) or type(error).__name__)

    async def _refuse_generation(self, generation: int, items: list[dict[str, Any]]) -> None:
        why = f"a message of generation {generation} is refused: this end has {self.generation}"
        described = describe_error(InfraFailure(why))
        answers = [{"error": item["call"], "reason": described} for item in items if "call" in item]
        if answers:  # with the peer's generation, so that its caller gets the reason
            self.writer.writelines(pack(generation, answers))
        self._lose(why)

    def _take(self, item: dict[str, Any]) -> None:
        try:
            if "call" in item:
                self._start(item["call"], str(item["method"]), dict(item["arguments"]))
            elif "cancel" in item:
                if task := self.running.get(item["cancel"]):
                    task.cancel()
            elif "event" in item:
                if self.on_event is not None:
                    self.on_event(str(item["event"]), item["value"])
            else:
                self._settle(item)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise BadFrame(f"has an invalid item ({type(error).__name__})") from error

    def _settle(self, item: dict[str, Any]) -> None:
        future = self.pending.get(item["answer"] if "answer" in item else item["error"])
        if future is None or future.done():  # cancelled meanwhile
            return
        if "answer" in item:
            future.set_result(item["value"])
        else:
            future.set_exception(revive_error(self.name, item["reason"]))

    def _start(self, number: int, method: str, arguments: dict[str, Any]) -> None:
        if number in self.running:
            raise BadFrame(f"gives the number {number} to two calls")
        if self.serve is None or len(self.running) >= MAX_CALLS:
            rule = "serves no calls" if self.serve is None else f"has {MAX_CALLS} calls open"
            described = describe_error(InfraFailure(f"{method} is refused: this end {rule}"))
            self._post({"error": number, "reason": described})
            return
        task = asyncio.create_task(self._answer(number, self.serve, method, arguments))
        self.running[number] = task
        task.add_done_callback(lambda _: self.running.pop(number, None))

    async def _answer(
        self, number: int, serve: Serve, method: str, arguments: dict[str, Any]
    ) -> None:
        try:
            self._post({"answer": number, "value": await serve(method, arguments)})
        except asyncio.CancelledError:
            if not self.lost.done():
                self._post({"error": number, "reason": describe_error(InfraFailure("cancelled"))})
            raise
        except Exception as error:
            if type(error).__name__ not in PLAIN and not isinstance(error, UserError | DataFailure):
                log.exception("%s failed", method)  # our own error: this log has the traceback
            if not self.lost.done():
                self._post({"error": number, "reason": describe_error(error)})

    async def _listen(self, patience_s: float) -> None:
        while True:
            left_s = self.heard_at + patience_s - awake_s()
            if left_s <= 0:
                self._lose(f"it sent nothing for {patience_s:g} s")
                return
            await asyncio.sleep(left_s)


# Both ends meet.


def proof(token: str, side: bytes, theirs: bytes, ours: bytes) -> bytes:
    return hmac.digest(token.encode(), side + theirs + ours, hashlib.sha256)


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Enables TCP keep-alive, so that the loss of the other machine is noticed."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)


async def connect(
    name: str,
    address: tuple[str, int],
    token: str,
    generation: int,
    *,
    on_event: OnEvent | None = None,
    patience_s: float | None = None,
    timeout_s: float = HANDSHAKE_S,
) -> Connection:
    """Connects, with retries for `timeout_s`. InfraFailure if no process with this token
    listens."""
    host, port = address
    loop = asyncio.get_running_loop()
    deadline, pause_s, reason = loop.time() + timeout_s, FIRST_PAUSE_S, "it did not answer"
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                reader, writer = await _open(name, host, port, token)
            break
        except (OSError, EOFError) as error:
            is_end = isinstance(error, EOFError)
            reason = "it ended the connection" if is_end else str(error) or reason
            if loop.time() + pause_s >= deadline:
                rule = f"no connection to {host}:{port} within {timeout_s:g} s"
                raise InfraFailure(f"{name}: {rule} ({reason})") from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return Connection(name, reader, writer, generation, on_event=on_event, patience_s=patience_s)


async def _open(
    name: str, host: str, port: int, token: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Opens a connection and authenticates both ends."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        keep_alive(writer)
        greeting = await reader.readexactly(len(MAGIC) + NONCE)
        theirs, ours = greeting[len(MAGIC) :], secrets.token_bytes(NONCE)
        if greeting[: len(MAGIC)] != MAGIC:
            raise InfraFailure(f"{name}: {host}:{port} is not a Pentad process")
        writer.write(MAGIC + ours + proof(token, b"client", theirs, ours))
        answer = await reader.readexactly(len(REFUSED))
        if answer == REFUSED:
            raise InfraFailure(f"{name}: {host}:{port} has another token than this run")
        if not hmac.compare_digest(answer, proof(token, b"server", ours, theirs)):
            raise InfraFailure(f"{name}: {host}:{port} does not know the token of this run")
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


class Listener:
    """The serving end: accepts connections with the token."""

    def __init__(self, sock: socket.socket, token: str, generation: int, serve: Serve) -> None:
        """`sock` is bound and listens."""
        self.sock = sock
        self.token = token
        self.generation = generation
        self.serve = serve
        self.strangers: dict[asyncio.StreamWriter, str] = {}
        """Unauthenticated connections, oldest first, and their hosts."""
        self.num_refused = 0
        self.connections: set[Connection] = set()
        self.had_any = asyncio.Event()
        self.server: asyncio.Server | None = None

    async def open(self) -> None:
        self.server = await asyncio.start_server(self._accept, sock=self.sock)

    async def wait_alone(self) -> None:
        """Waits until the last connection has closed."""
        await self.had_any.wait()
        while self.connections:
            await asyncio.wait([one.lost for one in self.connections])

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()
        for stranger in self.strangers:
            stranger.transport.abort()
        for connection in list(self.connections):
            await connection.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A closed connection has no peer name.
        host, port = (writer.get_extra_info("peername") or ("unknown", 0))[:2]
        self._make_room()
        self.strangers[writer] = host
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await self._prove(reader, writer)
        except (InfraFailure, OSError, EOFError) as error:
            self._log_refusal(f"{host}:{port}", self._why_refused(writer, error))
            writer.close()  # after the answer to a wrong token
            return
        finally:
            self.strangers.pop(writer, None)
        name = f"the caller at {host}:{port}"
        connection = Connection(name, reader, writer, self.generation, serve=self.serve)
        self.connections.add(connection)
        connection.lost.add_done_callback(lambda _: self.connections.discard(connection))
        self.had_any.set()

    def _make_room(self) -> None:
        """Drops the oldest unauthenticated connection of the host with the most of them, so that
        silent ones block no other callers."""
        while len(self.strangers) >= MAX_STRANGERS:
            nums = Counter(self.strangers.values())
            most = max(nums.values())
            oldest = next(one for one, host in self.strangers.items() if nums[host] == most)
            del self.strangers[oldest]
            oldest.transport.abort()

    def _why_refused(self, writer: asyncio.StreamWriter, error: Exception) -> str:
        if writer not in self.strangers:
            return f"it was the oldest of {MAX_STRANGERS} that had not proven the token"
        if isinstance(error, TimeoutError):
            return f"it did not prove the token within {HANDSHAKE_S:g} s"
        if isinstance(error, EOFError):
            return "it ended the connection before it had proven the token"
        return str(error) or type(error).__name__

    def _log_refusal(self, peer: str, why: str) -> None:
        self.num_refused = num = self.num_refused + 1
        if num <= LOGGED_REFUSALS or num & (num - 1) == 0:
            log.warning("%s is refused: %s (%d so far)", peer, why, num)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer)
        ours = secrets.token_bytes(NONCE)
        writer.write(MAGIC + ours)
        size = len(MAGIC) + NONCE + hashlib.sha256().digest_size
        answer = await reader.readexactly(size)
        theirs, given = answer[len(MAGIC) : len(MAGIC) + NONCE], answer[len(MAGIC) + NONCE :]
        if not hmac.compare_digest(given, proof(self.token, b"client", ours, theirs)):
            writer.write(REFUSED)
            raise InfraFailure("it does not know the token of this run")
        if writer not in self.strangers:
            raise EOFError  # dropped before its proof arrived
        writer.write(proof(self.token, b"server", theirs, ours))
