"""`openenv:URL` against a server of openenv-core, which has an environment of its own
(`make test-environments`)."""

import os
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from environment_talks import talk, until_it_listens

from pentad.core.errors import UserError
from pentad.rollout.executor import load_workflow

if "PENTAD_TEST_ENVIRONMENTS" not in os.environ:
    pytest.skip("make test-environments makes what it needs", allow_module_level=True)
PYTHON = Path(os.environ["PENTAD_TEST_ENVIRONMENTS"]) / "bin" / "python"


@contextmanager
def serving(action, sessions=4):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent / "openenv_server.py"
    command = [str(PYTHON), str(script), str(port), str(sessions), action]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until_it_listens(port, server, 120)
        yield f"openenv:http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def guessing():
    with serving("guess") as spec:
        yield spec


def test_an_episode_is_a_session_and_answers_are_actions(guessing):
    steps = ['{"number": 3}', 'I say {"number": 5}']
    facts, said = talk(guessing, fields={"secret": 5, "prompt": "x"}, steps=steps)
    assert facts["kind"] == "text" and said[0] == "\nguess"
    assert (said[1].observation, said[1].is_done) == ("higher", False)
    assert (said[2].observation, said[2].is_done) == ("right", True)
    assert [one.reward_parts["environment"] for one in said[1:]] == [0.0, 0.5]


@pytest.mark.parametrize("answer", ["no", '{"nomber": 5}', '{"number": "x"}', "[1]"])
def test_an_answer_that_is_no_action_ends_the_episode(guessing, answer):
    _, (_, step) = talk(guessing, steps=[answer])
    assert step.is_done and step.observation is None and step.reward_parts["environment"] == 0.0


def test_an_environment_that_raises_is_named(guessing):
    with pytest.raises(RuntimeError, match="EXECUTION_ERROR: the environment broke"):
        talk(guessing, steps=['{"number": 99}'])


def test_one_text_is_the_answer_itself_and_a_full_server_is_waited_for():
    with serving("word", sessions=1) as spec:
        for _ in range(2):
            _, said = talk(spec, fields={"secret": 4}, steps=["four"])
            assert said[1].observation == "right"


def test_an_address_without_a_server_is_refused():
    with pytest.raises(UserError, match=r"openenv:http://127.0.0.1:9: it cannot be made .*refused"):
        load_workflow("openenv:http://127.0.0.1:9")
