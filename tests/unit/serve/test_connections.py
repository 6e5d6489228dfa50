"""Connections with a server in a thread: timeouts, how many, and who may ask."""

import json
import socket
import time

import httpx
import openai
import pytest

from pentad.serve.app import Guard
from pentad.serve.wire import ApiError

POST = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def connect(server, text="", receive=None, source=None):
    connection = socket.socket()
    connection.settimeout(240)
    if source is not None:
        connection.bind((source, 0))
    if receive is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.sendall(text.encode())
    return connection


def post(**fields):
    body = json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 4} | fields)
    return f"{POST}content-length: {len(body)}\r\n\r\n{body}"


def is_open(connection):
    connection.settimeout(0.01)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


def wait_until(condition, timeout_s=240.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def hasty(start_server):
    return start_server(header_timeout_s=1.0, body_timeout_s=1.0, write_timeout_s=1.0)


@pytest.mark.parametrize(
    "sent", ["", "POST /v1/comp", "GET /health HTTP/1.1\r\nhost: localhost\r\n"]
)
def test_a_client_that_does_not_ask_is_cut_off(hasty, sent):
    started = time.monotonic()
    connection = connect(hasty, sent)
    assert connection.recv(100) == b""
    assert 0.9 < time.monotonic() - started < 60


def test_a_head_that_comes_byte_by_byte_has_no_longer(hasty):
    connection = connect(hasty, "GET /health HTTP/1.1\r\nx: ")
    sent = 0
    while is_open(connection):
        connection.sendall(b"x")
        sent += 1
        time.sleep(0.1)
        assert sent < 300


def test_a_body_nobody_asked_for_ends_the_connection_too(hasty):
    """The path is unknown and answered at once; the body goes on."""
    connection = connect(
        hasty, "POST /none HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
    )
    assert b" 404 " in connection.recv(1000)
    wait_until(lambda: not is_open(connection))


def test_clients_that_ask_and_read_are_left_alone(hasty):
    with httpx.Client(base_url=hasty.url) as client:
        for _ in range(12):  # one connection, longer than any of the timeouts
            assert client.get("/health").status_code == 200
            time.sleep(0.2)
    stream = hasty.client.completions.create(
        model="tiny", prompt="x", max_tokens=800, stream=True, extra_body={"ignore_eos": True}
    )
    started = time.monotonic()
    count = sum(1 for _ in stream)
    assert count > 100 and time.monotonic() - started > 0.1


def test_a_client_that_does_not_read_loses_its_place(hasty):
    many = post(stream=True, n=64, max_tokens=3000, ignore_eos=True, logprobs=0, temperature=1)
    sampler = hasty.endpoints.service.sampler
    before = sampler.stats()["tokens_drawn"]
    connection = connect(hasty, many, receive=2048)
    wait_until(lambda: sampler.stats()["tokens_drawn"] > before)
    wait_until(lambda: hasty.endpoints.num_open == 0)
    drawn = sampler.stats()["tokens_drawn"] - before
    assert drawn < 64 * 3000, "it was answered to the end"
    connection.close()


def test_a_client_may_have_so_many_connections(start_server):
    server = start_server(max_client_connections=3)
    silent = [connect(server) for _ in range(3)]
    # They are given half a second to ask.
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    assert [is_open(one) for one in silent] == [False, True, True]  # the oldest made room
    busy = [connect(server, post(stream=True, max_tokens=3000, ignore_eos=True)) for _ in range(3)]
    wait_until(lambda: server.endpoints.num_open == 3)
    answer = httpx.get(f"{server.url}/health")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "127.0.0.1 has too many open connections" in answer.json()["error"]["message"]
    for one in silent + busy:
        one.close()
    wait_until(lambda: server.endpoints.num_open == 0)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_one_client_cannot_take_every_place(start_server):
    """Told by the connection: a header that names another address changes nothing."""
    server = start_server(max_requests=4, client_share=0.75)
    long = post(stream=True, max_tokens=3000, ignore_eos=True)
    busy = [connect(server, long) for _ in range(3)]
    wait_until(lambda: server.endpoints.num_open == 3)
    forged = post(max_tokens=1).replace("\r\n", "\r\nx-forwarded-for: 10.0.0.1\r\n", 1)
    with connect(server, forged) as fourth:
        answer = b""
        while not answer.endswith(b"}}"):
            answer += fourth.recv(2000)
    assert b" 429 " in answer and b"3 requests of 127.0.0.1 are in progress" in answer
    with connect(server, post(max_tokens=1), source="127.0.0.2") as other:
        assert other.recv(2000).startswith(b"HTTP/1.1 200")
    for one in busy:
        one.close()
    wait_until(lambda: server.endpoints.num_open == 0)
    assert not server.endpoints.open


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"origin": "http://localhost:3000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:8000"}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://localhost.evil.example"}, 403),
        ({"origin": "null"}, 403),
        ([("origin", "http://evil.example"), ("origin", "http://localhost")], 403),
    ],
)
def test_a_server_at_loopback_answers_to_localhost_alone(server, headers, status):
    answer = httpx.get(f"{server.url}/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 403:
        name, value = headers[0] if isinstance(headers, list) else next(iter(headers.items()))
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{name} = {value}") and "start it with --allow-host" in message


@pytest.mark.parametrize("given", ["box", "BOX:8000"])
def test_further_names_are_given_with_or_without_a_port(given):
    guard = Guard(None, is_loopback=True, hosts=[given])
    for host in ("box", "box:9000", "Box"):
        guard.check("/health", {"host": host})
    with pytest.raises(ApiError, match="accepts only the name localhost"):
        guard.check("/health", {"host": "other"})


def test_a_key_is_asked_for_everywhere_but_health(start_server):
    server = start_server(api_key="secret")
    client = server.client
    for key in ("none", "secre", "secrets", "\u00e9"):
        answer = httpx.get(
            f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}".encode()}
        )
        assert answer.status_code == 401
    for value in ("Bearer secret", "bearer secret", "BEARER secret"):  # schemes have no case
        answer = httpx.get(f"{server.url}/v1/models", headers={"authorization": value})
        assert answer.status_code == 200
    twice = [("authorization", "Bearer none"), ("authorization", "Bearer secret")]
    assert httpx.get(f"{server.url}/v1/models", headers=twice).status_code == 401
    with pytest.raises(openai.AuthenticationError, match="is not the api_key of this server"):
        client.completions.create(model="tiny", prompt="x", max_tokens=1)
    client.with_options(api_key="secret").completions.create(model="tiny", prompt="x", max_tokens=1)
    assert httpx.get(f"{server.url}/health").status_code == 200
