"""A model as judge: its verdicts, its cache, and that its failures are no rewards."""

import asyncio
import json
import threading
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


def test_a_key_that_is_not_there_is_refused(model):
    with pytest.raises(UserError, match="api_key_env = NO_SUCH_KEY: there is no such"):
        scored(model, ["a"], api_key_env="NO_SUCH_KEY")
