"""Clients that mean ill against the real `pentad serve`: a good request is answered in time."""

import contextlib
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from pentad.data.toy import write_byte_model
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model

PATIENCE_S = 4.0
"""Within this a good request is answered, whatever others do, where the processor is not shared."""
NUM_FILES = 300
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
GOOD = {"model": "tiny", "prompt": "Hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("served")
    write_byte_model(root / "source")
    model = create_model(dims_of(root / "source"), seed=1)
    source = root / "source"
    save_model(model, root / "tiny", source_folder=source, tokenizer_folder=source)
    (root / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    return root / "tiny"


def patience_s():
    """A machine that does other things too is given as much longer as plain work takes there."""
    wall, own = time.monotonic(), time.thread_time()
    while time.thread_time() - own < 0.2:
        sum(range(1000))
    return PATIENCE_S * max(1.0, (time.monotonic() - wall) / 0.2)


class Served:
    """`pentad serve` in a process of its own, its error output in a file."""

    def __init__(self, folder, log):
        self.log = log
        command = [sys.executable, "-m", "pentad.cli.main", "serve", str(folder), "--port", "0"]
        command += ["--device", "cpu", "--max-running", "64", "--drain-s", "1"]
        files = (resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                preexec_fn=lambda: resource.setrlimit(*files),
            )
        line = self.process.stdout.readline()
        assert line.startswith("serving tiny at http://127.0.0.1:"), log.read_text()
        self.url = line.split()[-1]
        self.port = int(self.url.split(":")[2].removesuffix("/v1"))

    def ask(self, body=GOOD):
        path = "/chat/completions" if "messages" in body else "/completions"
        return httpx.post(self.url + path, json=body, timeout=240)

    def good_s(self):
        """Seconds until a good request was answered."""
        started = time.monotonic()
        assert self.ask().status_code == 200
        return time.monotonic() - started

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    server = Served(folder, tmp_path_factory.mktemp("log") / "errors")
    yield server
    server.end()


def conversation(num_turns):
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turn = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    return {"model": "tiny", "messages": turn * num_turns}


LARGE = {
    "10,000 prompts": ({"prompt": ["a"] * 10_000}, "10000 prompts: a request may have 128"),
    "100,000 prompts": ({"prompt": ["a"] * 100_000}, "100000 prompts: a request may have 128"),
    "many empty lists": ({"prompt": [[]] * 400_000}, "400000 prompts: a request may have 128"),
    "3.9 MB of text": ({"prompt": "ab c " * 780_000}, "more than 1000000 characters"),
    "990 kB of text": ({"prompt": "ab c " * 198_000}, "do not fit the context of 1024"),
    "990,000 ids": ({"prompt": [5] * 990_000}, "do not fit the context of 1024"),
    "ids, then a text": ({"prompt": [5] * 900_000 + ["a"]}, "must be a text, a list of texts"),
    "333 turns of calls": (conversation(333), "do not fit the context of 1024"),
    "2,000 messages": (conversation(700), "2100 messages: a request may have 1024"),
    "other fields": ({"prompt": "a", "metadata": [[]] * 1_200_000}, "more than 1000000 characters"),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_request_is_refused_soon_and_holds_up_nobody(served, name):
    body, said = LARGE[name]
    body = body if "messages" in body else GOOD | body
    patience = patience_s()
    answers = []
    large = threading.Thread(target=lambda: answers.append(served.ask(body)))
    started = time.monotonic()
    large.start()
    waits = [served.good_s()]
    while large.is_alive():
        waits.append(served.good_s())
    large.join()
    patience = max(patience, patience_s())
    assert max(waits) < patience
    assert time.monotonic() - started < 10 * patience
    assert (answers[0].status_code, said in answers[0].text) == (400, True), answers[0].text


def raw(served, *lines, body=b"", receive=None):
    """A connection that has sent these lines."""
    connection = socket.socket()
    if receive is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    connection.connect(("127.0.0.1", served.port))
    connection.sendall("".join(f"{line}\r\n" for line in lines).encode() + body)
    return connection


POST = ("POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json")


def test_400_silent_and_50_slow_clients_keep_no_good_one_waiting(served):
    """More connections than the process may open files; half of the slow ones do not read."""
    long = GOOD | {"stream": True, "max_tokens": 900, "ignore_eos": True, "logprobs": 0}
    content = json.dumps(long).encode()
    length = f"content-length: {len(content)}"
    held = [raw(served) for _ in range(400)]
    slow = [raw(served, POST[0]) for _ in range(10)]
    slow += [raw(served, *POST, length, "", body=content[:5]) for _ in range(15)]
    held += [raw(served, *POST, length, "", body=content, receive=2048) for _ in range(25)]
    ended = threading.Event()

    def trickle():
        while not ended.wait(0.2):
            for connection in slow:
                with contextlib.suppress(OSError):  # the server may have cut it off
                    connection.send(b"x")

    trickling = threading.Thread(target=trickle)
    trickling.start()
    try:
        time.sleep(1)
        patience = patience_s()
        waits = [served.good_s() for _ in range(5)]
        assert max(waits) < max(patience, patience_s())
    finally:
        ended.set()
        trickling.join()
        for connection in held + slow:
            connection.close()
    assert served.log.stat().st_size < 20_000, served.log.read_text()[:2000]


def test_many_bad_requests_write_few_lines(served):
    for _ in range(200):
        with raw(served, "\x00 nonsense", "") as connection:
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    with raw(served, *POST, "content-length: 2", "transfer-encoding: chunked", "") as connection:
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
    assert b" 400 " in answer and b"only one of the two is allowed" in answer
    assert b"connection: close" in answer
    assert served.log.stat().st_size < 20_000, served.log.read_text()[:2000]
    served.good_s()


def test_sigterm_ends_it_at_any_time(served):
    """The last test: the server is gone then."""

    def ask():
        with contextlib.suppress(httpx.HTTPError):
            served.ask(GOOD | {"prompt": "ab c " * 198_000})

    clients = [threading.Thread(target=ask) for _ in range(10)]
    for client in clients:
        client.start()
    time.sleep(0.5)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(120) == 0
    for client in clients:
        client.join(240)
