"""A model as judge: its verdicts, its cache, and that its failures are no rewards."""

import asyncio
import contextlib
import io
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from pentad.core.errors import DataFailure, UserError
from pentad.core.types import Group, Prompt, Sample
from pentad.rewards import judge as judges
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import JudgeConfig, RewardConfig


@pytest.fixture
def model(monkeypatch):
    """A server that says what `say` says to a question, or fails with its status."""
    monkeypatch.setattr(judges, "FIRST_WAIT_S", 0.01)
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            [message] = body["messages"]
            asked.append((message["content"], self.headers["authorization"]))
            said = server.say(message["content"], len(asked))
            self.send_response(said if isinstance(said, int) else 200)
            self.end_headers()
            if not isinstance(said, int):
                answer = {"choices": [{"message": {"role": "assistant", "content": said}}]}
                self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *given):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.url = asked, f"http://127.0.0.1:{server.server_port}/v1"
    server.say = lambda question, number: "I say 7 of 10: 7"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def scored(server, texts, **keys):
    template = "{prompt}|{answer}|{hint}|{completion}"
    given = {"url": server.url, "model": "m", "template": template, "scale": 10, "max_retries": 1}
    reward = RewardConfig(fn="judge", judge=JudgeConfig(**(given | keys)))

    def sample(text):
        ids, mask = np.array([1, 2]), np.array([False, True])
        return Sample(ids, mask, np.zeros(2, np.float32), np.array([-1, 0]), "stop", text)

    async def main():
        scorer = RewardScorer(reward)
        await scorer.start()
        try:
            prompt = Prompt(0, (1,), {"answer": "x", "hint": "h"}, "ask")
            return await scorer.score(Group(prompt, [sample(text) for text in texts]))
        finally:
            await scorer.close()

    return [one.reward for one in asyncio.run(main()).samples]


def test_the_last_number_is_the_reward_and_equal_questions_are_asked_once(
    model, tmp_path, monkeypatch
):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    keys = {"cache": f"{tmp_path}/verdicts.jsonl", "api_key_env": "JUDGE_KEY"}
    assert scored(model, ["{a}", "{a}", "b"], **keys) == [0.7] * 3
    assert sorted(model.asked) == [(f"ask|x|h|{t}", "Bearer secret") for t in ("b", "{a}")]
    assert scored(model, ["b"], **keys) == [0.7] and len(model.asked) == 2, "known by the file"
    (tmp_path / "verdicts.jsonl").write_text("nonsense\n")
    with pytest.raises(UserError, match="line 1 is no verdict of a judge"):
        scored(model, ["b"], **keys)


def test_a_judge_that_fails_is_asked_again(model):
    model.say = lambda question, number: 503 if number == 1 else "nothing" if number == 2 else "3"
    assert scored(model, ["a"], max_retries=2) == [0.3] and len(model.asked) == 3


@pytest.mark.parametrize(("said", "why"), [(500, "HTTP Error 500"), ("good", "has no number")])
def test_a_judge_that_keeps_failing_drops_the_group(model, said, why):
    model.say = lambda question, number: said if "bad" in question else "10"
    with pytest.raises(DataFailure, match=rf"m at http.* no verdict in 2 tries.*{why}") as caught:
        scored(model, ["fine", "bad"])
    assert caught.value.reason == "reward_judge"
    assert sum("bad" in question for question, _ in model.asked) == 2, "max_retries is 1"


def test_a_key_that_is_not_there_is_refused(model):
    with pytest.raises(UserError, match="api_key_env = NO_SUCH_KEY: this environment variable"):
        scored(model, ["a"], api_key_env="NO_SUCH_KEY")


HEAD = b"HTTP/1.1 200 OK\r\n"
DRIP = object()


def of_body(body, length=None):
    return HEAD + b"Content-Length: %d\r\n\r\n" % (length or len(body)) + body


def verdict(text):
    return of_body(json.dumps({"choices": [{"message": {"content": text}}]}).encode())


ODD_ANSWERS = {
    "a number beyond floats": (verdict("9" * 400), "too large for a reward"),
    "a body cut off": (of_body(b"{}", 5000), "4998 bytes too early"),
    "no HTTP": (b"\0\1 no\r\n\r\n", "BadStatusLine"),
    "a header without end": (HEAD + b"X: " + b"a" * 70_000, "LineTooLong"),
    "headers without end": (HEAD + b"X: a\r\n" * 200, "more than 100 headers"),
    "a broken chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "IncompleteRead"),
    "brackets without end": (of_body(b"[" * 100_000), "nested too deeply"),
    "a number of 5,000 digits": (of_body(b"9" * 5000), "ValueError"),
    "a list": (of_body(b"[]"), "TypeError"),
    "no choice": (of_body(b'{"choices": []}'), "IndexError"),
    "no text": (verdict(None), "TypeError"),
    "a body without end": (HEAD + b"\r\n" + b" " * 3_000_000, "longer than 2 MiB"),
    "a byte now and then": (DRIP, "took longer than 0.5 s"),
}


@pytest.fixture
def raw():
    """An address that answers each connection with the bytes of `said`."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            if raw.said is not DRIP:
                connection.sendall(raw.said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # a close before the end would be a reset
                    pass
                return
            connection.sendall(HEAD + b"\r\n")
            end = time.monotonic() + 5
            while time.monotonic() < end:
                connection.sendall(b" ")
                time.sleep(0.05)

    def serve():
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()

    class raw:
        url, said = f"http://127.0.0.1:{server.getsockname()[1]}/v1", b""

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    yield raw
    server.shutdown(socket.SHUT_RDWR)
    serving.join()
    server.close()


@pytest.mark.parametrize("name", ODD_ANSWERS)
def test_an_odd_answer_is_a_failure_of_the_judge_and_ends_in_time(raw, monkeypatch, name):
    monkeypatch.setattr(judges, "MAX_ANSWER_BYTES", 2 << 20)
    raw.said, why = ODD_ANSWERS[name]
    with pytest.raises(DataFailure, match=why) as caught:
        scored(raw, ["a"], max_retries=0, timeout_s=0.5 if raw.said is DRIP else 20.0)
    assert caught.value.reason == "reward_judge"


def test_a_cache_without_room_costs_verdicts_and_not_the_run(model, tmp_path, monkeypatch, caplog):
    cache = tmp_path / "verdicts.jsonl"
    keys = {"cache": str(cache)}
    assert scored(model, ["a"], **keys) == [0.7]
    before = cache.read_bytes()
    assert scored(model, ["b", "c"], cache=f"{tmp_path}/no/file") == [0.7, 0.7]
    assert caplog.text.count("a later run repeats it") == 1

    class Half(io.FileIO):
        def write(self, data):
            return super().write(data[:9])

    monkeypatch.setattr(judges.Path, "open", lambda path, mode, buffering: Half(path, mode[:1]))
    judge = judges.Judge(JudgeConfig(url=model.url, model="m", template="{completion}"))
    judge._append(cache, {"question": "q", "value": 1.0})
    monkeypatch.undo()
    assert cache.read_bytes() == before, "no half line"
