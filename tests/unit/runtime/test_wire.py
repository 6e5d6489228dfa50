"""Frames between processes: who is refused, what arrives, and what a lost peer means."""

import asyncio
import json
import re
import socket
import struct
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from role_targets import ERRORS, Thing

from pentad.core.errors import InfraFailure, RunError
from pentad.runtime import frames, wire

TOKEN = "secret of the run"


@asynccontextmanager
async def listening(generation=3, token=TOKEN):
    """A listener that serves a Thing, as `role_host` does."""
    thing = Thing({}, lambda event, value: [c.emit(event, value) for c in listener.connections])

    async def serve(method, arguments):
        return await getattr(thing, method)(**arguments)

    sock = socket.create_server(("127.0.0.1", 0))
    listener = wire.Listener(sock, token, generation, serve)
    await listener.open()
    listener.thing = thing
    try:
        yield listener, sock.getsockname()
    finally:
        await listener.close()


@asynccontextmanager
async def joined(address, token=TOKEN, generation=3, **more):
    connection = await wire.connect("thing", address, token, generation, **more)
    try:
        yield connection
    finally:
        await connection.close()


def play(scenario, seconds=120, **given):
    async def main():
        async with listening(**given) as (listener, address):
            return await asyncio.wait_for(scenario(listener, address), seconds)

    return asyncio.run(main())


async def still_serves(address):
    async with joined(address) as connection:
        assert await connection.call("echo", x=1) == {"x": 1}


def test_values_and_arrays_arrive_as_they_were():
    values = {
        "none": None,
        "text": "\u00e4\n\x00",
        "floats": [0.1, -1e-300, float("inf")],
        "nested": {"a": [{"b": [True, 2**60]}]},
    }
    arrays = [
        np.arange(7, dtype=np.int32),
        np.zeros((0, 3)),
        np.float32(np.random.default_rng(0).normal(size=(3, 5))).T,
        np.array([True, False, True]),
        np.array(5.0),
    ]

    async def scenario(listener, address):
        async with joined(address) as connection:
            got = await connection.call("echo", values=values, arrays=arrays, one=np.int64(7))
            doubled = await connection.call("double", array=np.arange(5))
        return got, doubled

    got, doubled = play(scenario)
    assert got["values"] == values and got["one"] == 7
    for sent, came in zip(arrays, got["arrays"], strict=True):
        assert came.dtype == sent.dtype and came.shape == sent.shape
        np.testing.assert_array_equal(came, sent)
    assert doubled.tolist() == [0, 2, 4, 6, 8]


def test_many_calls_are_in_flight_and_answers_find_their_callers():
    async def scenario(listener, address):
        async with joined(address) as connection:
            calls = [connection.call("late", value=i, seconds=0.01 * (i % 7)) for i in range(500)]
            return await asyncio.gather(*calls)

    assert [value for value, _ in play(scenario)] == list(range(500))


def test_calls_of_one_turn_start_together_and_in_order():
    """Whoever waits within a call finds all others of the turn started."""

    async def scenario(listener, address):
        async with joined(address) as connection:
            calls = [connection.call("late", value=i, seconds=0) for i in range(50)]
            return await asyncio.gather(*calls)

    assert [order for _, order in play(scenario)] == [list(range(50))] * 50


@pytest.mark.parametrize("kind", sorted(ERRORS))
def test_errors_come_back_as_what_they_are(kind):
    async def scenario(listener, address):
        async with joined(address) as connection:
            with pytest.raises(Exception) as caught:  # noqa: PT011
                await connection.call("fail", kind=kind)
            assert await connection.call("echo", x=1) == {"x": 1}
            return caught.value

    got, sent = play(scenario), ERRORS[kind]
    if kind == "KeyError":
        assert type(got) is RunError and str(got) == "thing failed: KeyError: 'surprise'"
        return
    assert type(got) is type(sent) and str(got) == str(sent)
    assert {k: v for k, v in vars(got).items() if k[0] != "_"} == vars(sent)


def test_what_cannot_travel_fails_alone(monkeypatch):
    async def scenario(listener, address):
        async with joined(address) as connection:
            outcomes = await asyncio.gather(
                connection.call("echo", x=1),
                connection.call("echo", x={1, 2}),
                connection.call("wrong"),
                connection.call("echo", x=np.zeros(2000, np.uint8)),
                connection.call("echo", x=np.array(["text"])),
                connection.call("echo", x=2),
                return_exceptions=True,
            )
            monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
            outcomes.append(
                (
                    await asyncio.gather(
                        connection.call("echo", x=np.zeros(2000, np.uint8)), return_exceptions=True
                    )
                )[0]
            )
            many = await asyncio.gather(
                *(connection.call("echo", x=np.full(300, i, np.uint8)) for i in range(9))
            )
            return [*outcomes, many]

    one, unsendable, answer, array, words, two, huge, many = play(scenario)
    assert one == {"x": 1} and two == {"x": 2} and len(array["x"]) == 2000
    assert "set cannot be sent" in str(unsendable) and isinstance(unsendable, RunError)
    assert "the answer cannot be sent: set cannot be sent" in str(answer)
    assert "<U4 cannot be sent" in str(words)
    assert "longer than the 1000 allowed" in str(huge)
    assert [answer["x"][0] for answer in many] == list(range(9))


def test_a_cancelled_call_is_cancelled_there_too():
    async def scenario(listener, address):
        async with joined(address) as connection:
            call = asyncio.ensure_future(connection.call("late", value=1, seconds=600))
            while not listener.thing.order:
                await asyncio.sleep(0.01)
            call.cancel()
            while not listener.thing.num_cancelled:
                await asyncio.sleep(0.01)
            assert await connection.call("echo") == {}

    play(scenario)


def test_events_arrive_in_order():
    heard = []

    async def scenario(listener, address):
        async with joined(address, on_event=lambda name, value: heard.append(value)) as connection:
            await connection.call("say", count=500)

    play(scenario)
    assert heard == list(range(500))


def test_a_lost_peer_ends_calls_under_way_and_later_ones():
    async def scenario(listener, address):
        connection = await wire.connect("thing", address, TOKEN, 3)
        calls = [
            asyncio.ensure_future(connection.call("late", value=i, seconds=60)) for i in (1, 2)
        ]
        await asyncio.sleep(0.05)
        for one in list(listener.connections):
            one.writer.transport.abort()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(InfraFailure, match="thing: the connection is lost"):
            await connection.call("echo")
        await connection.close()
        await still_serves(address)
        return outcomes

    assert all(isinstance(failure, InfraFailure) for failure in play(scenario))


def test_a_wrong_token_is_refused_on_both_sides():
    async def scenario(listener, address):
        with pytest.raises(InfraFailure, match="thing: .* has another token than this run"):
            await wire.connect("thing", address, "another", 3, timeout_s=60)
        await still_serves(address)

    play(scenario)


def test_a_server_without_the_token_is_refused():
    """One that answers the challenge with what it was sent."""

    async def parrot(reader, writer):
        writer.write(wire.MAGIC + bytes(wire.NONCE))
        heard = await reader.readexactly(len(wire.MAGIC) + wire.NONCE + 32)
        writer.write(heard[-32:])
        await writer.drain()
        writer.close()  # Python 3.12 waits for it where the server is closed

    async def scenario(listener, address):
        async with await asyncio.start_server(parrot, "127.0.0.1", 0) as server:
            place = server.sockets[0].getsockname()
            with pytest.raises(InfraFailure, match="does not know the token"):
                await wire.connect("thing", place, TOKEN, 3)

    play(scenario)


def test_an_old_generation_is_refused_with_a_sentence():
    async def scenario(listener, address):
        async with joined(address, generation=2) as connection:
            with pytest.raises(InfraFailure, match="generation 2 is refused: this end has 3"):
                await connection.call("echo")
        assert not listener.thing.num_calls
        await still_serves(address)

    play(scenario)


def test_a_late_answer_of_an_old_generation_is_refused():
    async def scenario(listener, address):
        async with joined(address) as connection:
            (serving,) = listener.connections
            call = asyncio.ensure_future(connection.call("late", value=1, seconds=0.1))
            while not serving.running:
                await asyncio.sleep(0.01)
            serving.generation = 2
            with pytest.raises(InfraFailure, match="generation 2 is refused: this end has 3"):
                await call

    play(scenario)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n" + bytes(200),
    "zeros": bytes(1000),
    "nothing": b"",
    "half": wire.MAGIC,
}


@pytest.mark.parametrize("kind", sorted(GARBAGE))
def test_strangers_are_refused_and_others_are_served(kind, monkeypatch):
    async def scenario(listener, address):
        monkeypatch.setattr(wire, "HANDSHAKE_S", 0.3)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(GARBAGE[kind])
        await reader.read(len(wire.MAGIC) + wire.NONCE)
        with suppress(ConnectionResetError):
            assert await reader.read() in (b"", wire.REFUSED)
        writer.close()
        while listener.connections or listener.strangers:
            await asyncio.sleep(0.01)
        monkeypatch.undo()
        await still_serves(address)

    play(scenario)


async def silent(address, num):
    """Strangers that connect and say nothing, accepted before this returns."""
    opened = [await asyncio.open_connection(*address) for _ in range(num)]
    for reader, _ in opened:
        await reader.readexactly(len(wire.MAGIC) + wire.NONCE)
    return opened


def test_silent_strangers_keep_nobody_out():
    """As many as there are places for; callers still come in at once, and the oldest one goes."""

    async def scenario(listener, address):
        idle = await silent(address, wire.MAX_STRANGERS)
        async with asyncio.timeout(wire.HANDSHAKE_S / 2):
            for _ in range(3):
                await still_serves(address)
            with suppress(ConnectionResetError):
                assert await idle[0][0].read() == b""
        assert len(listener.strangers) == wire.MAX_STRANGERS - 1
        for _, writer in idle:
            writer.transport.abort()

    play(scenario)


def test_callers_come_in_while_strangers_flood_the_port(monkeypatch):
    monkeypatch.setattr(wire, "MAX_STRANGERS", 2)

    async def flood(address, held):
        while True:
            held.append(await asyncio.open_connection(*address))
            await asyncio.sleep(0)

    async def scenario(listener, address):
        held = []
        floods = [asyncio.create_task(flood(address, held)) for _ in range(3)]
        try:
            for _ in range(5):
                async with joined(address, timeout_s=60) as connection:
                    assert await connection.call("echo", x=1) == {"x": 1}
                assert len(listener.strangers) <= 2
        finally:
            for task in floods:
                task.cancel()
            for _, writer in held:
                writer.transport.abort()
        assert len(held) > 5

    play(scenario)


def test_the_host_with_the_most_strangers_loses_one(monkeypatch):
    monkeypatch.setattr(wire, "MAX_STRANGERS", 4)

    async def scenario(listener, address):
        (other,) = await silent(address, 1)
        (first,) = listener.strangers
        listener.strangers[first] = "10.0.0.7"  # the oldest, from another machine
        idle = await silent(address, 5)
        assert first in listener.strangers and len(listener.strangers) == 4
        for _, writer in [other, *idle]:
            writer.transport.abort()

    play(scenario)


def test_strangers_that_are_gone_at_once_hold_no_place():
    """A connection that was reset before it is accepted has no peer to name."""

    async def scenario(listener, address):
        for _ in range(wire.MAX_STRANGERS + 8):
            gone = socket.create_connection(address)
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.close()
        await still_serves(address)
        while listener.strangers:
            await asyncio.sleep(0.01)

    play(scenario, seconds=wire.HANDSHAKE_S / 2)


async def say_nothing(reader, writer):
    await reader.read()


async def hang_up(reader, writer):
    writer.close()


async def reset(reader, writer):
    writer.transport.abort()


async def prove_nothing(reader, writer):
    writer.write(wire.MAGIC + bytes(wire.NONCE) + bytes(wire.NONCE + 8 + 32))
    await writer.drain()
    await reader.read()


REFUSALS = {
    "silent": (say_nothing, "it did not prove the token within 0.3 s"),
    "gone": (hang_up, "it ended the connection before it had proven the token"),
    "reset": (reset, "(it ended the connection before|Connection reset)"),
    "wrong": (prove_nothing, "it does not know the token of this run"),
}


@pytest.mark.parametrize("kind", sorted(REFUSALS))
def test_the_log_says_why_a_caller_is_refused(kind, monkeypatch, caplog):
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.3)
    behave, sentence = REFUSALS[kind]

    async def scenario(listener, address):
        reader, writer = await asyncio.open_connection(*address)
        await reader.readexactly(len(wire.MAGIC) + wire.NONCE)
        acting = asyncio.create_task(behave(reader, writer))
        while not listener.num_refused:
            await asyncio.sleep(0.01)
        writer.transport.abort()
        await asyncio.gather(acting, return_exceptions=True)

    play(scenario)
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"127.0.0.1:\d+ is refused: {sentence}.* \(1 so far\)", line)


def test_refusals_do_not_fill_the_log(monkeypatch, caplog):
    monkeypatch.setattr(wire, "LOGGED_REFUSALS", 3)

    async def scenario(listener, address):
        for num in range(40):
            _, writer = await asyncio.open_connection(*address)
            writer.transport.abort()
            while listener.num_refused <= num:
                await asyncio.sleep(0)

    play(scenario)
    counts = [record.getMessage().rpartition("(")[2] for record in caplog.records]
    assert counts == [f"{num} so far)" for num in (1, 2, 3, 4, 8, 16, 32)]


@pytest.mark.parametrize("behave", [hang_up, reset], ids=["closed", "reset"])
def test_a_connection_that_was_dropped_is_tried_again(behave):
    async def scenario(listener, address):
        nums = {"dropped": 0}

        async def dropping(reader, writer):
            """The first callers are dropped; the others reach the listener."""
            if nums["dropped"] < 3:
                nums["dropped"] += 1
                await behave(reader, writer)
                return
            await listener._accept(reader, writer)

        async with await asyncio.start_server(dropping, "127.0.0.1", 0) as server:
            place = server.sockets[0].getsockname()
            await still_serves(place)
        assert nums["dropped"] == 3

    play(scenario)


def test_a_port_that_opens_late_is_tried_until_it_does():
    async def scenario(listener, address):
        with socket.socket() as late:
            late.bind(("127.0.0.1", 0))  # and does not listen
            joining = asyncio.create_task(wire.connect("thing", late.getsockname(), TOKEN, 3))
            await asyncio.sleep(0.2)
            assert not joining.done()
            late.listen()
            async with await asyncio.start_server(listener._accept, sock=late):
                connection = await joining
                assert await connection.call("echo", x=1) == {"x": 1}
                await connection.close()

    play(scenario)


UNREACHABLE = {"nothing listens": "Connect call failed", "silence": "it did not answer"}


@pytest.mark.parametrize("kind", sorted(UNREACHABLE))
def test_tries_to_connect_end_with_the_last_reason(kind):
    async def scenario(listener, address):
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            if kind == "silence":
                mute.listen()
            at, rule = mute.getsockname(), f"within 0.4 s .*{UNREACHABLE[kind]}"
            with pytest.raises(InfraFailure, match=f"thing: no connection to .* {rule}"):
                await wire.connect("thing", at, TOKEN, 3, timeout_s=0.4)

    play(scenario, seconds=10)


def frame(table, text=b"[]", data=b"", sizes=None):
    return frames.SIZES.pack(*(sizes or (len(table), len(text), len(data)))) + table + text + data


CALL = json.dumps([{"call": 1, "method": "echo", "arguments": {"x": {"__array__": 0}}}]).encode()
BROKEN = {
    "huge": (frame(b"[3,[]]", sizes=(6, 2, 1 << 50)), "are allowed"),
    "no JSON": (frame(b"\xff\x00"), "cannot be read"),
    "deep": (frame(b"[3,[]]", b"[" * 100_000), "cannot be read"),
    "not items": (frame(b"[3,[]]", b"[1,2]"), "other data than items"),
    "no generation": (frame(b'["x",[]]'), "other data than items"),
    "objects": (frame(b'[3,[["O",[1]]]]', CALL, bytes(8)), "arrays of numbers"),
    "negative": (frame(b'[3,[["<i8",[-1]]]]', CALL, bytes(8)), "arrays of numbers"),
    "too few bytes": (frame(b'[3,[["<i8",[9]]]]', CALL, bytes(8)), "cannot be read"),
    "too many bytes": (frame(b'[3,[["<i8",[1]]]]', CALL, bytes(16)), "16 bytes of arrays"),
    "endless shape": (frame(b'[3,[["<i8",[99999999999999999999]]]]', CALL, b""), "cannot be read"),
    "no such array": (frame(b"[3,[]]", CALL), "cannot be read"),
    "half an item": (frame(b"[3,[]]", b'[{"call": 1}]'), "invalid item"),
    "same number": (
        frame(
            b"[3,[]]",
            b'[{"call":1,"method":"late","arguments":{}},' * 1
            + b'{"call":1,"method":"late","arguments":{}}]',
        ),
        "two calls",
    ),
}


@pytest.mark.parametrize("kind", sorted(BROKEN))
def test_broken_frames_end_their_connection_alone(kind):
    """Sent by one who knows the token: a fault, or a program of another version."""
    sent, sentence = BROKEN[kind]

    async def scenario(listener, address):
        async with joined(address) as connection:
            (serving,) = listener.connections
            connection.writer.write(sent)
            assert sentence in await asyncio.wait_for(asyncio.shield(serving.lost), 60)
        await still_serves(address)

    play(scenario)


def test_half_a_frame_is_a_lost_connection():
    async def scenario(listener, address):
        connection = await wire.connect("thing", address, TOKEN, 3)
        (serving,) = listener.connections
        connection.writer.write(struct.pack("!IIQ", 100, 100, 100) + b"[3,")
        await connection.writer.drain()
        await connection.close()
        assert "gone" in await serving.lost
        await still_serves(address)

    play(scenario)


def test_others_are_served_beside_a_slow_reader_which_is_waited_for():
    """The owner of a process may be stopped for long."""

    async def scenario(listener, address):
        connection = await wire.connect("thing", address, TOKEN, 3)
        (serving,) = listener.connections
        connection.tasks[0].cancel()  # reads no more
        connection.reader._transport.pause_reading()
        calls = [asyncio.ensure_future(connection.call("big", size=1 << 22)) for _ in range(8)]
        for _ in range(3):
            await still_serves(address)
        assert not serving.lost.done()
        await connection.close()
        await asyncio.gather(*calls, return_exceptions=True)

    play(scenario)


def test_a_process_that_takes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(wire, "STALL_S", 0.5)

    async def scenario(listener, address):
        async with joined(address) as connection:
            (serving,) = listener.connections
            serving.tasks[0].cancel()  # reads no more
            serving.reader._transport.pause_reading()
            big = np.zeros(1 << 24)
            with pytest.raises(InfraFailure, match="it has read nothing for 0.5 s"):
                await connection.call("double", array=big)

    play(scenario)


def test_silence_beyond_patience_is_a_lost_connection():
    async def scenario(listener, address):
        async with joined(address, patience_s=0.3) as connection:
            with pytest.raises(InfraFailure, match="it sent nothing for 0.3 s"):
                await connection.call("late", value=1, seconds=60)

    play(scenario)
