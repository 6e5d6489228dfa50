"""HTTP/1.1 calls to one address, as many at once as are asked for, each over its own connection.

A connection is kept for the next call. A client of our own, since a pool that looks through all its
connections for every call takes seconds for the thousand calls of a batch (docs/log.md).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

READ_BYTES = 1 << 16
IDLE_S = 2.0
"""After which a kept connection is not used again: servers close those that idle for five."""


class HttpError(Exception):
    """A call that was not answered, in words."""


@dataclass(slots=True, eq=False)
class HttpLink:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: h11.Connection
    idle_since: float = 0.0

    async def event(self) -> h11.Event:
        """The next part of the answer."""
        while not isinstance(event := self.protocol.next_event(), h11.Event):
            data = await self.reader.read(READ_BYTES)
            if not data and self.protocol.their_state is h11.SEND_RESPONSE:
                raise HttpError("the server closed the connection without an answer")
            self.protocol.receive_data(data)
        return event

    async def status(self) -> int:
        while not isinstance(event := await self.event(), h11.Response):
            pass  # what a server says before its answer
        return event.status_code

    async def body(self) -> AsyncIterator[bytes]:
        while not isinstance(event := await self.event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    @property
    def is_usable(self) -> bool:
        is_fresh = time.monotonic() - self.idle_since < IDLE_S
        return is_fresh and not self.reader.at_eof() and not self.writer.is_closing()


class HttpClient:
    """Calls of one address: `http://host:port` or `https://...`, and a path before all others."""

    def __init__(self, address: str, connect_s: float) -> None:
        url = urlsplit(address)
        self.host, self.is_secure = url.hostname or "", url.scheme == "https"
        self.port = url.port or (443 if self.is_secure else 80)
        self.authority, self.path = url.netloc.rpartition("@")[2], url.path.rstrip("/")
        self.connect_s = connect_s
        self.kept: list[HttpLink] = []

    @asynccontextmanager
    async def call(
        self, method: str, target: str, body: bytes | None = None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """The status of the answer and its body, as it comes. A call that is left before the end
        of its answer closes the connection, which ends the work for it."""
        link = self._take_kept() or await self._open()
        try:
            headers = [("Host", self.authority), ("Accept", "*/*")]
            if body is not None:
                headers += [("Content-Type", "application/json")]
            headers += [("Content-Length", str(len(body or b"")))]
            request = h11.Request(method=method, target=self.path + target, headers=headers)
            send = link.protocol.send
            parts = [send(request), send(h11.Data(data=body or b"")), send(h11.EndOfMessage())]
            link.writer.write(b"".join(part for part in parts if part))
            await link.writer.drain()
            yield await link.status(), link.body()
        except (OSError, h11.ProtocolError) as error:
            raise HttpError(str(error) or type(error).__name__) from error
        finally:
            self._keep(link)

    async def close(self) -> None:
        while self.kept:
            self.kept.pop().writer.close()

    def _take_kept(self) -> HttpLink | None:
        while self.kept:
            link = self.kept.pop()
            if link.is_usable:
                return link
            link.writer.close()
        return None

    async def _open(self) -> HttpLink:
        secure = ssl.create_default_context() if self.is_secure else None
        try:
            async with asyncio.timeout(self.connect_s):
                reader, writer = await asyncio.open_connection(self.host, self.port, ssl=secure)
        except TimeoutError as error:
            raise HttpError(f"no connection within {self.connect_s:g} s") from error
        except OSError as error:
            raise HttpError(f"no connection: {error.strerror or error}") from error
        return HttpLink(reader, writer, h11.Connection(h11.CLIENT))

    def _keep(self, link: HttpLink) -> None:
        states = link.protocol.states
        if states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            link.protocol.start_next_cycle()
            link.idle_since = time.monotonic()
            self.kept.append(link)
        else:
            link.writer.close()
