"""Environment classes: TRL's contract, and what happens when an object of one misbehaves."""

import asyncio
import os
import re
import time
from pathlib import Path

import pytest
from sections import make_executor

from pentad.core.errors import DataFailure, UserError
from pentad.core.seeds import derive_seed
from pentad.core.types import Prompt, SamplingParams
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import RewardConfig
from pentad.rollout.environments import tools_of
from pentad.rollout.executor import load_workflow
from pentad.rollout.schemas import schema_of

COUNTER = '''
import contextlib, json, os, socket, struct, time

FORGED = {
    "refuse": [{"error": n, "reason": {"kind": "UserError", "problems": ["forged"]}}
               for n in range(9)],
    "confuse": [{"error": n, "reason": []} for n in range(9)],
    "mumble": [{"answer": n, "value": [1, {"value": 3}]} for n in range(9)],
}

class Counter:
    """Counts up to a goal."""

    def reset(self, goal: int = 2, **row):
        self.goal, self.count, self.reward, self._hidden = int(goal), 0, 0.0, object()
        self.pid = os.getpid()

    def increment(self, step: int, note: str | None = None) -> str:
        """Adds to the counter.

        Args:
            step: How much to add,
                at once.
            note: What for.

        Returns:
            The new count.
        """
        self.count += step
        self.reward = float(self.count == self.goal)
        return str(self.count)

    async def misbehave(self, how: str) -> str:
        """Does what it should not.

        Args:
            how: In which way.
        """
        if how == "hang":
            time.sleep(600)
        if how == "die":
            os._exit(3)
        if how == "flood":
            return "x" * 1_000_000
        if how in FORGED:
            head, text = b"[0,[]]", json.dumps(FORGED[how]).encode()
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    sock = socket.socket(fileno=os.dup(fd))
                    sock.send(struct.pack("!IIQ", len(head), len(text), 0) + head + text)
            time.sleep(600)
        raise ValueError("as it was told to")


class Owner(Counter):
    def get_reward(self):
        return {"hit": float(self.count == self.goal), "small": -0.25}


class Greeter(Counter):
    async def reset(self, goal, **row):
        super().reset(goal)
        return f" The goal is {goal}."
'''
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
ADD = CALL % ("increment", '{"step": 2}')


@pytest.fixture
def made(tmp_path):
    """Workflows of a file's classes, ended with the test."""
    (tmp_path / "counter.py").write_text(COUNTER)
    found = []

    def make(name, source=None):
        if source:
            (tmp_path / "other.py").write_text(source)
        workflow = load_workflow(f"class:{tmp_path}/{'other' if source else 'counter'}.py:{name}")
        found.append(workflow)
        return workflow

    yield make
    for workflow in found:
        workflow.close()


@pytest.fixture
def play(scripted, chat_tokenizer):
    def run(workflow, *scripts, fields=None, reward=None, prompt=None, **given):
        """One group; each sample says its script, answer by answer."""
        end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
        seeds = [derive_seed(1, "sample", 0, 0, index) for index in range(len(scripts))]

        def answer(request, i):
            script = scripts[seeds.index(request.seeds[0])]
            turn = sum(id_ == end for id_ in request.prompt_ids[len(prompt.ids) :]) // 2
            return [chat_tokenizer.convert_tokens_to_ids(c) for c in script[turn]] + [end]

        prompt = prompt or Prompt(0, (1, 2), fields or {})
        given = {
            "params": SamplingParams(max_new_tokens=400, stop_ids=(end,)),
            "num_samples": len(scripts),
            "run_seed": 1,
            "vocab_size": len(chat_tokenizer),
            "max_retries": 0,
            **given,
        }

        async def rollout():
            scorer = RewardScorer(reward) if reward else None
            if scorer:
                await scorer.start()
            executor = make_executor(
                {"a": scripted(answer)}, workflow, scorer, chat_tokenizer, **given
            )
            try:
                return await executor.rollout(prompt, 0)
            finally:
                if scorer:
                    await scorer.close()

        return asyncio.run(rollout()).samples

    return run


def test_methods_are_described_as_transformers_describes_them(made):
    from transformers.utils import get_json_schema

    space = {}
    exec(COUNTER, space)
    ours = {tool["function"]["name"]: tool for tool in tools_of(made("Counter"))}
    for name in ("increment", "misbehave"):
        assert ours[name] == get_json_schema(getattr(space["Counter"](), name))


def test_annotations_of_json_become_what_transformers_makes_of_them():
    from transformers.utils import get_json_schema

    def tool(a: list[int], b: dict[str, float], c: str | int | None, d: tuple[int, str], e: bool):
        """Takes all.

        Args:
            a: one
            b: two
            c: three
            d: four
            e: five
        """

    assert schema_of(tool, strict=True) == get_json_schema(tool)


def test_each_sample_has_an_object_of_its_own_in_a_process_of_its_own(made, play):
    two = CALL % ("increment", '{"step": 1}')
    samples = play(made("Counter"), [ADD, "done"], [two, two, "done"], [two, "no"])
    assert [sample.reward for sample in samples] == [1.0, 1.0, 0.0]
    assert samples[0].reward_parts == {"environment": 1.0}
    said = (("assistant", ADD), ("tool", "2"), ("assistant", "done"))
    assert samples[0].turns == said and samples[1].turns[3] == ("tool", "2")


def test_a_class_with_get_reward_gives_named_parts(made, play):
    [sample] = play(made("Owner"), [ADD, "done"], fields={"goal": 2})
    assert sample.reward == 0.75 and sample.reward_parts == {"hit": 1.0, "small": -0.25}


def test_a_reward_function_may_take_the_environment(made, play, tmp_path):
    source = (
        "def score(environment): return environment.count / 4 + hasattr(environment, '_hidden')"
    )
    source += "\ndef all(completions, environments): return [e.count for e in environments]"
    (tmp_path / "rewards.py").write_text(source)
    rewards = (f"{tmp_path}/rewards.py:score", f"{tmp_path}/rewards.py:all")
    [sample] = play(made("Counter"), [ADD, "done"], reward=RewardConfig(fn=rewards))
    assert sample.reward_parts == {"score": 0.5, "all": 2.0} and sample.environment is None
    with pytest.raises(UserError, match="it takes the environment, and the workflow"):
        play(load_workflow("single_turn"), ["x"], reward=RewardConfig(fn=rewards[0]))


def test_what_reset_says_ends_the_last_message_of_the_prompt(made, play, chat_tokenizer):
    messages = ({"role": "user", "content": "count"},)

    def text(content):
        asked = [{"role": "user", "content": content}]
        return chat_tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)

    ids = chat_tokenizer.encode(text("count"), add_special_tokens=False)
    prompt = Prompt(0, tuple(ids), {"goal": 7}, text("count"), 0, messages)
    [sample] = play(made("Greeter"), ["no"], prompt=prompt)
    given = sample.ids[~sample.mask].tolist()
    expected = text("count The goal is 7.")
    assert given == chat_tokenizer.encode(expected, add_special_tokens=False)
    assert sample.given_text == chat_tokenizer.decode(given, skip_special_tokens=False)
    with pytest.raises(UserError, match="reset takes 'goal', and a row has no such column"):
        play(made("Greeter"), ["no"])


def test_bad_calls_and_tools_that_raise_are_text_to_the_policy(made, play):
    raises = CALL % ("misbehave", '{"how": "raise"}')
    calls = [CALL % ("nothing", "{}"), CALL % ("increment", "2"), "<tool_call>{</tool_call>"]
    floods = CALL % ("misbehave", '{"how": "flood"}')
    named = CALL % ("increment", '{"__array__": 0}')
    answers = [calls[0] + calls[1], calls[2], raises, floods, named, "done"]
    [sample] = play(made("Counter"), answers)
    texts = [text for role, text in sample.turns if role == "tool"]
    assert all(text.startswith("error: give a name of ['increment'") for text in texts[:3])
    assert texts[3] == "error: ValueError: as it was told to"
    assert len(texts[4]) < 33_000
    assert texts[4].endswith("[1000000 characters, the first 32768 are shown]")
    assert "unexpected keyword argument '__array__'" in texts[5], "a name of our frames"


LOOPS = """import asyncio, threading
class Loops:
    def reset(self):
        self.found = {}
    def find(self, name: str) -> str:
        'Finds a name.'
        self.found[name] = threading.current_thread() is threading.main_thread()
        return asyncio.run(asyncio.sleep(0, "ran"))
    def get_reward(self):
        return float(self.found["__array__"])
"""


def test_a_method_runs_in_a_main_thread_without_an_event_loop(made, play):
    find = CALL % ("find", '{"name": "__array__"}')
    [sample] = play(made("Loops", LOOPS), [find, "done"])
    assert sample.turns[1] == ("tool", "ran") and sample.reward == 1.0


@pytest.mark.parametrize(
    ("how", "part", "reward", "limit_s"),
    [
        ("hang", "tool_timeout", 0.0, 5.0),
        *((how, "workflow_error", 1.0, 60.0) for how in ("die", "refuse", "confuse", "mumble")),
    ],
)
def test_a_tool_that_hangs_or_dies_ends_its_own_episode(made, play, how, part, reward, limit_s):
    bad = CALL % ("misbehave", f'{{"how": "{how}"}}')
    workflow = made("Counter")
    samples = play(workflow, [bad], [ADD, "done"], [ADD, "done"], tool_timeout_s=limit_s)
    assert [sample.reward for sample in samples] == [reward, 1.0, 1.0]
    assert samples[0].reward_parts == {"reward_failed": 1.0, f"reward_failed/{part}": 1.0}
    with pytest.raises(DataFailure, match="misbehave of .*counter.py:Counter") as caught:
        play(workflow, [bad], tool_timeout_s=1.0 if how == "hang" else limit_s)
    assert caught.value.reason == part


def test_the_processes_of_episodes_end_with_them(made, play):
    workflow = made("Counter")
    play(workflow, [ADD, "done"], [CALL % ("misbehave", '{"how": "hang"}')], tool_timeout_s=5.0)
    nursery = workflow.processes.child.pid
    children = Path(f"/proc/{nursery}/task/{nursery}/children")
    deadline = time.monotonic() + 60
    while children.read_text().split() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children.read_text() == ""
    os.kill(nursery, 9)
    assert workflow.processes.child.wait(60)
    assert play(workflow, [ADD, "done"])[0].reward == 1.0, "they are started again"


REFUSED = {
    "no types": ("def f(self, a):\n        'Doc.'", "method f: its parameter a has no type"),
    "strange types": ("def f(self, a: object):\n        'Doc.'", "type <class 'object'> of its p"),
    "no docstring": ("def f(self, a: int): pass", "method f: it has no docstring"),
    "any arguments": ("def f(self, *a: int):\n        'Doc.'", r"\*a has no schema"),
    "no tools": ("", "it has no tools; public methods"),
    "two tools of one name": (
        "def tool_schemas(self): return 2 * [{'type': 'function', 'function': {'name': 'f'}}]\n"
        "    def call_tool(self, name, arguments): pass",
        "two of its tools have the name f",
    ),
    "an object that cannot be made": ("def __init__(self): 1 / 0", "cannot be made.*ZeroDivision"),
}


def test_a_class_that_writes_to_the_connection_when_it_is_imported_is_refused(made):
    source = "import os\nfor fd in range(3, 99):\n    try: os.write(fd, bytes(99))\n"
    source += "    except OSError: pass\nclass Bad: pass\n"
    with pytest.raises(UserError, match="wrote to the descriptor of its connection"):
        made("Bad", source)


def children():
    """The processes that this one has."""
    return {pid for task in Path("/proc/self/task").iterdir()
            for pid in (task / "children").read_text().split()}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_class_that_cannot_be_used_is_refused_by_name(made, kind):
    method, sentence = REFUSED[kind]
    source = f"class Bad:\n    def reset(self): pass\n    {method}\n"
    place, before = "rollout.workflow = class:.*other.py:Bad", children()
    with pytest.raises(UserError, match=rf"{place}: .*{sentence}") as caught:
        made("Bad", source)
    assert len(caught.value.problems) == 1, "a method that is refused is not said to be missing"
    assert children() <= before, "its process has ended"


def test_a_class_that_is_none_is_refused(made):
    with pytest.raises(UserError, match="has no attribute 'Missing'"):
        made("Missing")
    with pytest.raises(UserError, match=r"it cannot be made \(TypeError: it has no method reset"):
        made("Bad", "class Bad: pass")


def test_the_classes_of_the_page_run(play, tmp_path):
    docs = Path(__file__).parents[3] / "docs"
    pages = [(docs / name).read_text() for name in ("environments.md", "environment-packages.md")]
    counter, pole = re.findall(r"```python\n(.*?)```", "".join(pages), re.DOTALL)
    (tmp_path / "counter.py").write_text(counter)
    (tmp_path / "pole.py").write_text(pole)
    workflow = load_workflow(f"class:{tmp_path}/counter.py:Counter")
    [sample] = play(workflow, [ADD, "done"], fields={"goal": 2, "prompt": "x"})
    assert sample.reward_parts == {"environment": 1.0}
    workflow.close()
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    workflow = load_workflow(f"class:{tmp_path}/pole.py:Pole")
    [sample] = play(workflow, ["left", "right", "up"], fields={"seed": 1})
    assert sample.reward == 2.0 and sample.turns[1][1].startswith("The pole leans")
    workflow.close()
