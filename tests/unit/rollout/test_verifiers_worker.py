"""The process of verifiers answers every episode, whatever its code does."""

import asyncio
import socket
from contextlib import asynccontextmanager
from decimal import Decimal

import pytest

from pentad.data import verifiers_worker as worker
from pentad.runtime.wire import Connection


class Environment:
    @asynccontextmanager
    async def serving(self):
        yield


async def cancelled():
    raise asyncio.CancelledError


async def unsendable():
    return {"rewards": {"reward": Decimal(1)}}


async def failing():
    raise ZeroDivisionError("in a reward")


async def scored():
    return {"rewards": {"reward": 0.5}}


@pytest.mark.parametrize(
    ("episode", "answer"),
    [
        (scored, {"rewards": {"reward": 0.5}}),
        (failing, {"error": "ZeroDivisionError: in a reward"}),
        (cancelled, {"error": "CancelledError: "}),
        (unsendable, {"error": "TypeError: Object of type Decimal is not JSON serializable"}),
    ],
)
def test_an_episode_is_answered_however_it_ends(episode, answer, monkeypatch):
    monkeypatch.setattr(worker, "play", lambda *_: episode())

    async def call():
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        server = worker.EpisodeServer(Environment(), writer)
        serving = asyncio.create_task(server.serve(reader))
        streams = await asyncio.open_unix_connection(sock=ours)
        connection = Connection("verifiers", *streams, generation=0)
        try:
            async with asyncio.timeout(10):
                return await connection.call("play", task="{}")
        finally:
            await connection.close()
            await serving
            writer.close()

    assert asyncio.run(call()) == answer
