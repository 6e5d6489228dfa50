"""The key of servers that a run starts: who is refused, and that no other user can read it."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pentad.samplers import server_key
from pentad.samplers.process import ServerProcess

KEY = "k" * 43


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setenv(server_key.VARIABLE, KEY)

    async def app(scope, receive, send):
        await send({"type": "reached"})

    return server_key.KeyGate(app)


def asked(gate, kind="http", *headers, method="POST", path="/collective_rpc"):
    """What a request is answered with."""
    sent = []
    scope = {"type": kind, "method": method, "path": path, "headers": list(headers)}

    async def send(message):
        sent.append(message)

    asyncio.run(gate(scope, None, send))
    return sent


def bearer(key):
    return b"authorization", f"Bearer {key}".encode()


REFUSED = {
    "nothing": [],
    "another key": [bearer("x" * 43)],
    "the start of the key": [bearer(KEY[:-1])],
    "more than the key": [bearer(KEY + "k")],
    "no key": [bearer("")],
    "another scheme": [(b"authorization", f"Basic {KEY}".encode())],
    "another header": [(b"x-api-key", KEY.encode())],
    "two of them": [bearer("x"), bearer(KEY)],
}
PATHS = ["/", "/health", "/metrics", "/v1/models", "/collective_rpc", "/pause", "/server_info"]


@pytest.mark.parametrize("headers", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("path", PATHS)
def test_a_request_without_the_key_is_refused_on_every_path(gate, headers, path):
    for method in ("GET", "POST", "OPTIONS", "HEAD"):
        first, *_ = asked(gate, "http", *headers, method=method, path=path)
        assert (first["type"], first["status"]) == ("http.response.start", 401)


def test_a_request_with_the_key_passes_and_so_does_the_start_of_the_server(gate):
    assert asked(gate, "http", bearer(KEY)) == [{"type": "reached"}]
    assert asked(gate, "http", (b"Authorization", bearer(KEY)[1])) == [{"type": "reached"}]
    assert asked(gate, "lifespan") == [{"type": "reached"}]


def test_a_websocket_without_the_key_is_closed(gate):
    assert asked(gate, "websocket") == [{"type": "websocket.close", "code": 1008}]
    assert asked(gate, "websocket", bearer(KEY)) == [{"type": "reached"}]


def test_a_server_without_a_key_does_not_start(monkeypatch):
    monkeypatch.delenv(server_key.VARIABLE, raising=False)
    with pytest.raises(KeyError):
        server_key.KeyGate(None)


def test_a_key_that_is_an_argument_is_on_no_command_line(tmp_path):
    """SGLang's: children of its process see what it sees."""
    (tmp_path / "served.py").write_text(
        "import json, os, pathlib, sys\n"
        "line = pathlib.Path('/proc/self/cmdline').read_bytes().decode().split('\\0')\n"
        "print(json.dumps([__name__, __spec__.name, sys.argv[1:], line, dict(os.environ)]))\n"
    )
    given = os.environ | {server_key.VARIABLE: KEY, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", server_key.__name__, "served", "--port", "7"]
    done = subprocess.run(words, capture_output=True, text=True, env=given, check=True)
    name, spec, arguments, line, environment = json.loads(done.stdout)
    assert (name, spec) == ("__main__", "served")
    assert arguments == ["--port", "7", "--api-key", KEY]
    assert KEY not in str(line) and KEY not in str(environment)


def test_no_other_user_reads_the_log_of_a_server(tmp_path):
    """SGLang writes its arguments there."""
    old = os.umask(0)
    try:
        log = tmp_path / "servers" / "sglang-0.log"
        process = ServerProcess("s", [sys.executable, "-c", "print(7)"], os.environ, log)
        process.child.wait()
    finally:
        os.umask(old)
    assert (log.read_text(), oct(log.stat().st_mode & 0o777)) == ("7\n", "0o600")
    asyncio.run(process.stop())


def test_nothing_on_the_way_of_weights_to_vllm_or_factors_to_sglang_is_unpickled():
    """Also not by a name from elsewhere: torch.load and its like read pickles too."""
    package = Path(server_key.__file__).parents[1]
    names = ("vllm_worker", "vllm", "sglang_worker", "receiver")
    for file in (*(f"samplers/{name}.py" for name in names), "sync/group.py"):
        text = (package / file).read_text()
        ways = ("import pickle", "pickle.", "torch.load", "eval(")
        assert not [way for way in ways if way in text]
