"""Whole runs of environments of other packages, and of a judge, through the command."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from pentad.cli import main as cli
from pentad.data.toy import write_byte_model
from pentad.telemetry.steps import read_lines

SERVER = """
from mcp.server import MCPServer

server = MCPServer("numbers")

@server.tool()
def add(number: int) -> str:
    "Adds to the total of this session."
    return str(number)

server.run()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose template shows tools, rows, an MCP server and a reward."""
    root = tmp_path_factory.mktemp("environments")
    write_byte_model(root / "bytes", with_tools=True)
    rows = [{"prompt": f"Game {seed}.", "seed": seed, "answer": "1"} for seed in range(4)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "server.py").write_text(SERVER)
    (root / "reward.py").write_text("def score(completion): return len(completion) / 10\n")
    return root


def train(folder, trial, *words):
    """Two steps; the samples of it."""
    command = ["train", f"fileroot={folder}", "user=me", f"trial_name={trial}", *words]
    command += [f"actor.path={folder}/bytes", "actor.init_from_scratch=true", "total_train_steps=2"]
    command += [f"train_dataset.path={folder}/rows.jsonl", "train_dataset.batch_size=2"]
    command += ["gconfig.n_samples=2", "gconfig.max_new_tokens=6"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    records = folder / "logs/me/default" / trial
    assert len(read_lines(records / "steps.jsonl")) == 2
    lines = read_lines(records / "samples.jsonl")
    assert lines
    return lines


def test_a_game_of_gymnasium_is_trained(folder):
    pytest.importorskip("gymnasium", reason="gymnasium is not installed (pip install gymnasium)")
    for line in train(folder, "gym", "rollout.workflow=gym:CartPole-v1"):
        assert "Game " in line["prompt"] and "[" in line["prompt"], "the observation follows"
        assert set(line["reward_parts"]) == {"environment"} and line["reward"] >= 0.0


def test_a_policy_with_the_tools_of_an_mcp_server_is_trained(folder):
    pytest.importorskip("mcp", reason="mcp is not installed (pip install mcp)")
    words = [f"rollout.workflow=mcp:python {folder}/server.py", "train_dataset.chat_template=true"]
    for line in train(folder, "mcp", *words, f"reward.fn={folder}/reward.py:score"):
        assert "add(number)" in line["prompt"]
        assert line["reward"] == pytest.approx(len(line["text"]) / 10)


class Verdict(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = asked["messages"]
        self.server.asked.append(message["content"])
        said = {"role": "assistant", "content": "Hm, that is worth a 7"}
        body = json.dumps({"choices": [{"message": said, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def judge():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Verdict)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_judge_gives_the_rewards_of_a_run(folder, judge):
    words = ["reward.fn=judge", f"reward.judge.url=http://127.0.0.1:{judge.server_port}/v1"]
    words += ["reward.judge.model=m", "reward.judge.template='{prompt} {completion}?'"]
    words += ["reward.judge.scale=10"]
    lines = train(folder, "judge", *words)
    assert {line["reward"] for line in lines} == {0.7}
    assert all(f"{line['prompt']} {line['text']}?" in judge.asked for line in lines)
