"""HTTP/1.1 calls to one server, concurrent, each over its own connection, with time limits (`Wire`)
and one-line errors.

A connection is reused by later calls, unless its answer was abandoned before the end. Other clients
search all pooled connections for every call, which takes seconds for the thousand calls of a batch
(docs/log.md).
"""

from __future__ import annotations

import asyncio
import base64
import json
import select
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote, urlencode, urlsplit

import h11
from pydantic import BaseModel, ValidationError

from pentad.core.errors import InfraFailure

READ_BYTES = 1 << 16
IDLE_S = 2.0
"""Idle seconds after which a connection is not reused: servers close it after five."""


class HttpError(Exception):
    """A failed call, with a description."""


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
            pass  # informational responses before the answer
        return event.status_code

    async def body(self) -> AsyncIterator[bytes]:
        while not isinstance(event := await self.event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield bytes(event.data)

    def rest(self) -> bool:
        """Prepares the connection for another call; False if that is not possible. Data that arrive
        meanwhile stay in the socket."""
        is_done = self.protocol.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}
        if not is_done or self.protocol.trailing_data[0] or self.writer.is_closing():
            return False
        self.protocol.start_next_cycle()
        self.writer.transport.pause_reading()  # type: ignore[attr-defined]
        self.idle_since = time.monotonic()
        return True

    def wake(self) -> bool:
        """Whether the connection can be reused: it is open and has no unexpected data."""
        if time.monotonic() - self.idle_since > IDLE_S or self.writer.is_closing():
            return False
        poll = select.poll()
        poll.register(self.writer.get_extra_info("socket"), select.POLLIN)
        if poll.poll(0):
            return False
        self.writer.transport.resume_reading()  # type: ignore[attr-defined]
        return True


class HttpClient:
    """Calls to one address: `http://host:port` or `https://...`, and a prefix of all paths."""

    def __init__(self, address: str, connect_s: float, key: str | None = None) -> None:
        """`key`: sent with every call, instead of a name and password in the address."""
        url = urlsplit(address)
        self.host = url.hostname or ""
        self.port = url.port or (443 if url.scheme == "https" else 80)
        self.authority, self.path = url.netloc.rpartition("@")[2], url.path.rstrip("/")
        self.headers = [("Host", self.authority), ("Accept", "*/*")]
        if key is not None:
            self.headers += [("Authorization", f"Bearer {key}")]
        elif url.username is not None:
            secret = unquote(f"{url.username}:{url.password or ''}").encode()
            self.headers += [("Authorization", f"Basic {base64.b64encode(secret).decode()}")]
        self.secure = ssl.create_default_context() if url.scheme == "https" else None
        self.connect_s = connect_s
        self.kept: list[HttpLink] = []
        """Idle connections; the most recent is last."""
        self.is_closed = False

    @asynccontextmanager
    async def call(
        self, method: str, target: str, body: bytes | None = None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Yields the status of the answer and its body as a stream. Leaving the context before the
        end of the body closes the connection, which aborts the request on the server."""
        link = self._take_kept() or await self._open()
        try:
            headers = [*self.headers, ("Content-Length", str(len(body or b"")))]
            if body is not None:
                headers += [("Content-Type", "application/json")]
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
        self.is_closed = True
        while self.kept:
            self.kept.pop().writer.close()

    def _take_kept(self) -> HttpLink | None:
        while self.kept:
            link = self.kept.pop()
            if link.wake():
                return link
            link.writer.close()
        return None

    async def _open(self) -> HttpLink:
        try:
            async with asyncio.timeout(self.connect_s):
                connecting = asyncio.open_connection(self.host, self.port, ssl=self.secure)
                reader, writer = await connecting
        except TimeoutError as error:
            raise HttpError(f"no connection within {self.connect_s:g} s") from error
        except OSError as error:
            raise HttpError(f"no connection: {error.strerror or error}") from error
        return HttpLink(reader, writer, h11.Connection(h11.CLIENT))

    def _keep(self, link: HttpLink) -> None:
        while self.kept and time.monotonic() - self.kept[0].idle_since > IDLE_S:
            self.kept.pop(0).writer.close()
        if link.protocol.our_state is not h11.DONE or link.protocol.their_state is h11.SEND_BODY:
            link.writer.transport.abort()  # close() would first send pending data
        elif not self.is_closed and link.rest():
            self.kept.append(link)
        else:
            link.writer.close()


# One server.

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 256 << 20
"""Maximum size of one answer; the longest ones (tokens with experts) have a tenth of it."""
MAX_QUOTED = 300
"""Maximum number of characters of a server's answer in an error."""

M = TypeVar("M", bound=BaseModel)


class Wire:
    """One server's address, which error messages name."""

    def __init__(self, address: str, kind: str, key: str | None = None) -> None:
        self.address = address.rstrip("/")
        self.http = HttpClient(self.address, CONNECT_TIMEOUT_S, key)
        scheme, _, _ = self.address.partition("://")
        # Without the user name and password that it may contain.
        self.where = f"{kind} at {scheme}://{self.http.authority}{self.http.path}"

    async def get(self, path: str, **params: str) -> Any:
        answer = await self._call("GET", path, params=params)
        return self._parsed(path, answer) if answer else None

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = CALL_TIMEOUT_S,
        is_json: bool = True,
        **params: str | Sequence[str],
    ) -> Any:
        answer = await self._call("POST", path, body=body, timeout_s=timeout_s, params=params)
        return self._parsed(path, answer) if is_json and answer else None

    def read(self, path: str, schema: type[M], answer: Any) -> M:
        """Parses the answer as the expected type."""
        try:
            return schema.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"])) or "the answer"
            found = f"{at}: {first['msg']}"
            raise InfraFailure(f"{self.where}: {path}: invalid answer ({found})") from error

    async def close(self) -> None:
        await self.http.close()

    async def answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> tuple[int, str]:
        """Returns the status and the text of an answer, without checking them."""
        sent = None if body is None else json.dumps(body).encode()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.http.call(method, path, sent) as (status, pieces),
            ):
                data = b"".join([piece async for piece in bounded(pieces)])
                return status, data.decode("utf-8", "replace")
        except TimeoutError as error:
            raise InfraFailure(f"{self.where}: {path} was not answered in time") from error
        except HttpError as error:
            raise InfraFailure(f"{self.where}: {path} failed ({error})") from error

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        timeout_s: float | None = CALL_TIMEOUT_S,
        params: Mapping[str, str | Sequence[str]],
    ) -> str:
        query = f"?{urlencode(params, doseq=True)}" if params else ""
        status, text = await self.answer(method, path + query, body, timeout_s)
        if status != 200:
            raise self.refused(path, status, text)
        return text

    def refused(self, path: str, status: int, text: str) -> InfraFailure:
        quoted = " ".join(text[:MAX_QUOTED].split())
        return InfraFailure(f"{self.where}: {path} answered {status} ({quoted})")

    def _parsed(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            quoted = " ".join(text[:40].split())
            raise InfraFailure(f"{self.where}: {path} answered no JSON ({quoted!r})") from error


async def bounded(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields the pieces; raises HttpError if they exceed MAX_ANSWER_BYTES."""
    num_bytes = 0
    async for piece in pieces:
        num_bytes += len(piece)
        if num_bytes > MAX_ANSWER_BYTES:
            raise HttpError(f"its answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
        yield piece
