"""The HTTP client of servers: connections are used again, or closed where an answer is left."""

import asyncio

import pytest

from pentad.core.errors import InfraFailure
from pentad.samplers import http
from pentad.samplers.http import Wire

PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n[\r\n1\r\n]\r\n0\r\n\r\n"


class RawServer:
    """Answers every request with `reply`; what it saw is kept."""

    def __init__(self, reply: bytes = PLAIN, closes: bool = False) -> None:
        self.reply, self.closes = reply, closes
        self.heads: list[bytes] = []
        self.num_connections = self.num_gone = 0

    async def __aenter__(self) -> "RawServer":
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=2048)
        port = self.server.sockets[0].getsockname()[1]
        self.wire = Wire(f"http://127.0.0.1:{port}", "it")
        return self

    async def __aexit__(self, *_) -> None:
        await self.wire.close()
        self.server.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writer = writer
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
                await reader.readexactly(int(fields[b"Content-Length"]))
                self.heads.append(head)
                writer.write(self.reply)
                await writer.drain()
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_gone += 1
        finally:
            writer.close()


def test_calls_run_at_once_and_their_connections_serve_the_next():
    async def main():
        async with RawServer() as server:
            first = await asyncio.gather(*(server.wire.post("/a", {"n": n}) for n in range(300)))
            made = server.num_connections
            await asyncio.gather(*(server.wire.post("/a", {}) for _ in range(300)))
            return first, made, server.num_connections

    first, made, after = asyncio.run(main())
    assert first == [[]] * 300 and made == after <= 300


def test_an_answer_in_chunks_is_whole():
    async def main():
        async with RawServer(CHUNKED) as server:
            return [await server.wire.get("/a", tag="b c"), server.heads]

    answer, (head,) = asyncio.run(main())
    assert answer == [] and head.startswith(b"GET /a?tag=b+c HTTP/1.1\r\n")


def test_a_connection_that_the_server_closed_is_not_used_again():
    async def main():
        async with RawServer(closes=True) as server:
            for _ in range(3):
                assert await server.wire.post("/a", {}) == []
                await asyncio.sleep(0.05)  # it is closed, and what closes it arrives
            return server.num_connections

    assert asyncio.run(main()) == 3


def test_what_came_unasked_is_no_answer_to_the_next_call():
    async def main():
        async with RawServer(PLAIN) as server:
            assert await server.wire.post("/a", {}) == []
            server.writer.write(PLAIN.replace(b"[]", b"{}"))
            await server.writer.drain()
            await asyncio.sleep(0.05)
            return await server.wire.post("/a", {}), server.num_connections

    assert asyncio.run(main()) == ([], 2)


def test_a_name_and_a_password_in_the_address_are_sent():
    async def main():
        async with RawServer(PLAIN) as server:
            port = server.wire.address.rpartition(":")[2]
            wire = Wire(f"http://me:secret@127.0.0.1:{port}", "it")
            assert wire.where == f"it at http://127.0.0.1:{port}"
            await wire.post("/a", {})
            await wire.close()
            return server.heads[0]

    assert b"Authorization: Basic bWU6c2VjcmV0\r\n" in asyncio.run(main())


def test_a_connection_that_idled_is_not_used_again(monkeypatch):
    async def main():
        async with RawServer() as server:
            await server.wire.post("/a", {})
            monkeypatch.setattr(http, "IDLE_S", -1.0)
            await server.wire.post("/a", {})
            return server.num_connections

    assert asyncio.run(main()) == 2


@pytest.mark.parametrize(
    "reply, sentence",
    [
        (b"", "the server closed the connection without an answer"),
        (PLAIN[:-1], "/a failed .peer closed connection"),
        (b"nonsense\r\n\r\n", "/a failed .illegal status line"),
        (PLAIN.replace(b"200 OK", b"503 Full"), r"/a answered 503 .\[\]"),
    ],
)
def test_what_is_no_answer_is_one_sentence(reply, sentence):
    async def main():
        async with RawServer(reply, closes=True) as server:
            await server.wire.post("/a", {})

    with pytest.raises(InfraFailure, match=sentence):
        asyncio.run(main())


def test_a_call_that_is_cancelled_or_late_closes_its_connection():
    async def main():
        async with RawServer(PLAIN[:-1]) as server:
            with pytest.raises(InfraFailure, match="/a was not answered in time"):
                await server.wire.post("/a", {}, timeout_s=0.2)
            task = asyncio.create_task(server.wire.post("/a", {}))
            while len(server.heads) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            while server.num_gone < 2:
                await asyncio.sleep(0.01)
            assert not server.wire.http.kept

    asyncio.run(asyncio.wait_for(main(), 60))
