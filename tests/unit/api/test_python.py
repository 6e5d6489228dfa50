"""Rows, functions and classes of a Python session as files that a config names."""

import asyncio
import json
import linecache
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pentad
from pentad.api.here import REWARDS, ScoredHere
from pentad.api.runs import _Given, apart_from_loop, spec_of
from pentad.config.load import load_config
from pentad.core.errors import RunError, UserError
from pentad.core.specs import load
from pentad.data.toy import write_byte_model
from pentad.rollout.executor import load_workflow
from pentad.telemetry.recorder import LISTENERS, listening

SESSION = '''
import json as js
import re
from collections import Counter

LIMIT = [2, "b"]
opened = open("/dev/null")


def inner(text):
    return len(re.findall("a", text)) * LIMIT[0]


def score(completion, group: str = ""):
    """Uses a function, modules, a value, and attributes named as things of the session."""
    found = Counter(completion)
    return inner(completion) + found["b"] + len(js.dumps(found.most_common()))


def reads(completion):
    return opened.read()


def outer():
    k = 3

    def enclosed(completion):
        return k

    return enclosed


def asks(completion):
    return "score".title() + js.__name__


class Game:
    def reset(self, **row):
        return LIMIT[1]
'''


@pytest.fixture
def session():
    """Names of a notebook: their source is known, and no file has them."""
    names = {"__name__": "__main__"}
    linecache.cache["<cell>"] = (len(SESSION), None, SESSION.splitlines(True), "<cell>")
    exec(compile(SESSION, "<cell>", "exec"), names)
    yield names
    names["opened"].close()
    del linecache.cache["<cell>"]


def test_a_function_of_a_session_is_written_with_what_it_uses(session, tmp_path):
    spec = spec_of(session["score"], tmp_path, "reward")
    assert spec == f"{tmp_path / 'score.py'}:score"
    assert load(spec)("aab") == session["score"]("aab")
    text = (tmp_path / "score.py").read_text()
    assert "opened" not in text and text.count("def ") == 2
    asks = load(spec_of(session["asks"], tmp_path, "reward"))
    assert asks("x") == "Scorejson" and "def score" not in (tmp_path / "asks.py").read_text()


def test_a_function_of_a_file_is_named_by_it(tmp_path):
    assert spec_of(json.dumps, tmp_path, "reward") == f"{json.__file__}:dumps"
    assert spec_of(load_config, tmp_path, "reward") == "pentad.config.load:load_config"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("reads", "reward = reads: uses opened, a TextIOWrapper of this session, which cannot b"),
        (
            "outer",
            "reward = outer.<locals>.enclosed: is not a function or class at the top of",
        ),
        ("lambda", "reward = <lambda>: is not a function or class at the top"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(session, tmp_path, name, sentence):
    given = {"outer": session["outer"](), "lambda": eval("lambda c: 1.0", {"__name__": "__main__"})}
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        spec_of(given.get(name, session.get(name)), tmp_path, "reward")
    assert "in_process=True" in str(error.value)


def test_objects_become_files_that_the_config_names(tmp_path):
    recipe = {"fileroot": str(tmp_path), "actor": {"path": "m", "optimizer.lr": 0.5}, "seed": 3}
    given = _Given(recipe, {"experiment_name": "a ${b}", "gconfig.stop": ["x"]})
    given.set_rows("train_dataset", [{"prompt": "1", "answer": [1, None]}])
    given.set_reward(["exact_match", load_config], in_process=False)
    config = given.read()
    assert (config.actor.optimizer.lr, config.seed, config.gconfig.stop) == (0.5, 3, ("x",))
    assert config.experiment_name == "a ${b}"
    assert config.reward.functions == ("exact_match", "pentad.config.load:load_config")
    [row] = Path(config.train_dataset.path).read_text().splitlines()
    assert json.loads(row) == {"prompt": "1", "answer": [1, None]}
    for rows, sentence in (([1], "row 0 is a int"), ([{"a": {1}}], "row 0 cannot be written as J")):
        with pytest.raises(UserError, match=sentence):
            given.set_rows("valid_dataset", rows)
    with pytest.raises(UserError, match="recipe = 3: is neither the path of a YAML file nor"):
        _Given(3, None)


def test_a_reward_of_this_process_is_a_workflow_of_it(tmp_path):
    given = _Given({"fileroot": str(tmp_path)}, None)

    def mine(completion, answer):
        return 1.0

    given.set_reward(mine, in_process=True)
    spec = given.read().rollout.workflow
    assert spec == "pentad.api.here:mine"
    assert isinstance(load(spec)(), ScoredHere) and REWARDS.pop("mine") is mine
    with pytest.raises(UserError, match="mine was a reward of a Python session that has ended"):
        load_workflow(spec)
    with pytest.raises(UserError, match="in_process = true: takes one function"):
        given.set_reward(["gsm8k"], in_process=True)


def test_a_run_has_an_event_loop_of_its_own_within_another():
    async def cell():
        with apart_from_loop():
            found = asyncio.run(asyncio.sleep(0, result=3))
        await asyncio.sleep(0)
        return found, asyncio.get_running_loop().is_running()

    assert asyncio.run(cell()) == (3, True)


def test_an_interrupted_cell_stops_the_run_saved_and_the_next_call_resumes_it(tmp_path):
    write_byte_model(tmp_path / "model")
    recipe = {
        "fileroot": str(tmp_path),
        "actor": {"path": str(tmp_path / "model"), "init_from_scratch": True},
        "train_dataset.batch_size": 1,
        "total_train_steps": 5,
    }
    seen = []

    def on_step(record):
        seen.append(record["step"])
        if seen == [1, 2]:
            os.kill(os.getpid(), signal.SIGINT)

    async def cell():
        rows = [{"prompt": "a", "response": "b"}] * 5
        summary = pentad.sft(recipe, dataset=rows, on_step=on_step, device="cpu")
        await asyncio.sleep(0)
        return summary

    with pytest.raises(RunError, match="stopped by SIGINT after . of 5 steps; .* is saved in"):
        asyncio.run(cell())
    before, num_seen = signal.getsignal(signal.SIGINT), len(seen)
    assert 2 <= num_seen < 5
    assert asyncio.run(cell()).num_steps == 5
    assert seen == [1, 2, 3, 4, 5] and signal.getsignal(signal.SIGINT) is before


def test_a_script_that_a_signal_ends_says_so_without_a_traceback(tmp_path):
    write_byte_model(tmp_path / "model")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, pentad\n"
        "def on_step(record):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        f"recipe = {{'fileroot': {str(tmp_path)!r}, 'train_dataset.batch_size': 1,\n"
        f"          'actor.path': {str(tmp_path / 'model')!r}, 'actor.init_from_scratch': True,\n"
        "          'total_train_steps': 5}\n"
        "rows = [{'prompt': 'a', 'response': 'b'}] * 5\n"
        "pentad.sft(recipe, dataset=rows, on_step=on_step, device='cpu')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.match(r"stopped by SIGTERM after \d of 5 steps; what was trained is saved in", last)


def test_listeners_are_those_of_the_call():
    with listening(print):
        assert [print] == LISTENERS
    with listening(None):
        assert LISTENERS == []


def test_importing_pentad_is_light():
    code = (
        "import pentad, sys; assert pentad.__version__; print('torch' in sys.modules, dir(pentad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False")
    with pytest.raises(AttributeError, match="module 'pentad' has no attribute 'nothing'"):
        __import__("pentad").nothing  # noqa: B018
