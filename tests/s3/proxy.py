"""A proxy between client and store that loses, delays and cuts what a test wants lost."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

BUSY = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: 65\r\n"
    b"Connection: close\r\n\r\n<Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>"
)
DENIED = BUSY.replace(b"503 Slow Down", b"403 Forbidden").replace(b"SlowDown", b"NoAccess")
assert BUSY.endswith(b"</Error>") and len(BUSY.partition(b"\r\n\r\n")[2]) == 65


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber=" in self.target

    @property
    def is_object_read(self) -> bool:
        return self.method == "GET" and "?" not in self.target


Fault = str
"""busy: 503, denied: 403, reset: the connection ends, stall: no answer: none of these is passed on.
lost: passed on, the answer thrown away. cut: the answer's body ends in the middle. "": none."""


@dataclass
class Proxy:
    """`choose` says for every request what goes wrong with it; `seen` are all that came."""

    port: int
    choose: Callable[[Request], Fault] = lambda request: ""
    seen: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.ready.wait(10)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    def count(self, wanted: Callable[[Request], bool]) -> int:
        return sum(wanted(request) for request in list(self.seen))

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        server = self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.ready.set()
        self.loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._pass_one(reader, writer):
                pass
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # either side has gone, or the test is over
        finally:
            writer.close()

    async def _pass_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer, over a connection of its own to the store."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        request = Request(method, target)
        if b"100-continue" in head.lower():
            head = re.sub(rb"(?i)expect: 100-continue\r\n", b"", head)
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(_length(head))
        fault = self.choose(request)
        self.seen.append(request)
        self.faults.append(fault)
        if fault in ("busy", "denied"):
            writer.write(BUSY if fault == "busy" else DENIED)
            await writer.drain()
            return False
        if fault == "reset":
            writer.transport.abort()
            return False
        if fault == "stall":
            await asyncio.sleep(3600)
        return await self._forward(request, head, body, writer, fault)

    async def _forward(
        self, request: Request, head: bytes, body: bytes, writer: asyncio.StreamWriter, fault: Fault
    ) -> bool:
        source, sink = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            sink.write(head + body)
            await sink.drain()
            answer = await source.readuntil(b"\r\n\r\n")
            length = 0 if request.method == "HEAD" else _length(answer)
            if fault == "lost":
                await source.readexactly(length)
                writer.transport.abort()
                return False
            if fault == "cut":
                length //= 2
            writer.write(answer)
            while length > 0:
                data = await source.read(min(length, 1 << 16))
                if not data:
                    raise EOFError
                writer.write(data)
                await writer.drain()
                length -= len(data)
            return fault != "cut"
        finally:
            sink.close()


def _length(head: bytes) -> int:
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    assert found or b"chunked" not in head.lower(), head
    return int(found[1]) if found else 0
