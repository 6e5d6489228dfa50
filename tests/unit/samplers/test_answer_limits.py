"""An answer of a server has an end, in every way that it is read."""

import asyncio
import contextlib

import pytest

from pentad.core.errors import InfraFailure
from pentad.samplers import http
from pentad.samplers.http import Wire


async def serve_endless(reader, writer, start: bytes, piece: bytes) -> None:
    await reader.readuntil(b"\r\n\r\n")
    head = b"HTTP/1.1 %b\r\nTransfer-Encoding: chunked\r\n\r\n" % start
    writer.write(head)
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()


ANSWERS = {
    "one endless value": (b"200 OK", b"[" * 65536),
    "an endless error": (b"500 No", b"x" * 65536),
}


@pytest.mark.parametrize("call", ["get", "post"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_without_end_is_a_sentence(monkeypatch, name, call):
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 8 << 20)

    async def run():
        server = await asyncio.start_server(
            lambda r, w: serve_endless(r, w, *ANSWERS[name]), "127.0.0.1", 0
        )
        port = server.sockets[0].getsockname()[1]
        wire = Wire(f"http://127.0.0.1:{port}", "server")
        try:
            await getattr(wire, call)("/x")
        finally:
            await wire.close()
            server.close()

    with pytest.raises(InfraFailure, match="its answer is longer than 8 MiB"):
        asyncio.run(run())
