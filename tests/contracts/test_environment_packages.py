"""Environments of other packages, held against the packages themselves."""

import asyncio
import socket
import subprocess
import sys

import pytest
from environment_talks import talk, until_it_listens
from sections import data_source

from pentad.core.errors import UserError
from pentad.core.roles import Scored
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import RewardConfig
from pentad.rollout.executor import load_workflow

SERVER = """
import sys

from mcp.server import MCPServer

server = MCPServer("numbers")
total = 0

@server.tool()
def add(number: int) -> str:
    "Adds to the total of this session."
    global total
    total += number
    return str(total)

@server.tool()
def fail() -> str:
    "Fails."
    raise ValueError("on purpose")

server.run(*sys.argv[1:2], **({"port": int(sys.argv[2])} if sys.argv[2:] else {}))
"""


def test_gymnasium_is_played_by_text():
    pytest.importorskip("gymnasium", reason="gymnasium is not installed (pip install gymnasium)")
    facts, [begins, right, nonsense] = talk(
        "gym:CartPole-v1", fields={"seed": 3}, steps=["I push right: 1", "I push up: 7"]
    )
    assert facts["kind"] == "text" and begins.startswith("\n[")
    assert (right.reward_parts, right.is_done) == ({"environment": 1.0}, False)
    assert nonsense.is_done and nonsense.observation is None, "no such action"
    _, again = talk("gym:CartPole-v1", fields={"seed": 3}, steps=["1"])
    assert again == [begins, right], "the row's seed is the episode's"
    with pytest.raises(UserError, match=r"gym:Nothing-v0: it cannot be made \(NameNotFound"):
        load_workflow("gym:Nothing-v0")


def test_an_mcp_server_gives_its_tools(tmp_path):
    pytest.importorskip("mcp", reason="mcp is not installed (pip install mcp)")
    (tmp_path / "server.py").write_text(SERVER)
    calls = [("add", {"number": 2}), ("add", {"number": 3}), ("fail", {})]
    facts, said = talk(f"mcp:python {tmp_path}/server.py", calls=calls)
    [add, _] = facts["tools"]
    assert add["function"]["description"] == "Adds to the total of this session."
    assert add["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert said[:3] == [None, "2", "5"]
    assert said[3].startswith("error:\nError executing tool fail")
    _, said = talk(f"mcp:python {tmp_path}/server.py", calls=calls[:1])
    assert said == [None, "2"], "each episode has a server of its own"
    with pytest.raises(UserError, match="it cannot be made"):
        load_workflow("mcp:python -c 1")


def test_an_mcp_server_is_reached_by_its_address(tmp_path):
    """Its process serves all sessions, so that what it keeps is common to them."""
    pytest.importorskip("mcp", reason="mcp is not installed (pip install mcp)")
    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(tmp_path / "server.py"), "streamable-http", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until_it_listens(port, server)
        facts, said = talk(f"mcp:http://127.0.0.1:{port}/mcp", calls=[("add", {"number": 2})])
        assert [tool["function"]["name"] for tool in facts["tools"]] == ["add", "fail"]
        _, again = talk(f"mcp:http://127.0.0.1:{port}/mcp", calls=[("add", {"number": 3})])
        assert (said, again) == ([None, "2"], [None, "5"])
    finally:
        server.kill()
        server.wait()
    with pytest.raises(UserError, match="it cannot be made"):
        load_workflow(f"mcp:http://127.0.0.1:{port}/mcp")


def test_reasoning_gym_makes_rows_and_scores_answers():
    pytest.importorskip(
        "reasoning_gym", reason="reasoning-gym is not installed (pip install reasoning-gym)"
    )
    path = "reasoning_gym:chain_sum?size=5&seed=2"
    rows = data_source(path=path).open(streaming=False)
    assert len(rows) == 5 and rows.digest == data_source(path=path).open(streaming=False).digest
    row = rows.row(1)
    from pentad.data.reasoning_gym_rows import score

    right = Scored(1.0, {"correct": 1.0})
    assert score(f"so <answer>{row['answer']}</answer>", row["reasoning_gym"]) == right
    assert score(row["answer"], row["reasoning_gym"]) == right
    wrong = score("<answer>x</answer>", row["reasoning_gym"])
    assert wrong.value < 1.0 and wrong.parts == {"correct": 0.0}
    for wrong in ("reasoning_gym:nothing", "reasoning_gym:chain_sum?terms=1"):
        with pytest.raises(UserError, match="reasoning-gym rejects it"):
            data_source(path=wrong).open(streaming=False)

    async def start():
        scorer = RewardScorer(RewardConfig(fn="pentad.data.reasoning_gym_rows:score"))
        await scorer.start()
        try:
            scorer.check_columns(row)
        finally:
            await scorer.close()

    asyncio.run(start())
