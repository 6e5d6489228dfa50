"""The examples of the documentation, run as they stand."""

import asyncio
import re
from pathlib import Path

import pytest
from sections import make_executor

from pentad.core.types import Prompt, SamplingParams
from pentad.rewards.functions import BATCHED, BUILT_IN, PARAMETERS
from pentad.rewards.scorer import RewardScorer
from pentad.rewards.section import RewardConfig
from pentad.rollout.executor import load_workflow

DOCS = Path(__file__).parents[3] / "docs"


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture
def execute(scripted, chat_tokenizer):
    def run(workflow, turns, fields, reward=None, num_samples=1):
        """One group whose policy says `turns`, one after the other."""
        end = chat_tokenizer.convert_tokens_to_ids("<|im_end|>")
        said = [[chat_tokenizer.convert_tokens_to_ids(c) for c in turn] + [end] for turn in turns]
        sampler = scripted(lambda request, i: said[(len(sampler.requests) - 1 + i) % len(said)])
        given = {
            "params": SamplingParams(max_new_tokens=99, stop_ids=(end,)),
            "num_samples": num_samples,
            "run_seed": 1,
            "vocab_size": len(chat_tokenizer),
        }

        async def rollout():
            scorer = RewardScorer(reward) if reward else None
            if scorer:
                await scorer.start()
            executor = make_executor({"a": sampler}, workflow, scorer, chat_tokenizer, **given)
            try:
                return await executor.rollout(Prompt(0, (1, 2), fields), 0)
            finally:
                if scorer:
                    await scorer.close()

        return asyncio.run(rollout()).samples

    return run


def test_the_example_reward_scores(execute, tmp_path):
    (tmp_path / "mine.py").write_text("\n".join(python_blocks("rewards.md")))
    workflow, place = load_workflow("single_turn"), f"{tmp_path}/mine.py"
    [sample] = execute(workflow, ["6+7=13"], {"answer": "13"}, RewardConfig(fn=f"{place}:score"))
    assert sample.reward == 1.1 and sample.reward_parts == {"correct": 1.0, "work": 0.1}
    row = {"answer": "13", "solution": "13", "difficulty": 3}
    by_name = RewardConfig(fn=f"{place}:by_difficulty")
    [sample] = execute(workflow, ["so 13"], row, by_name)
    assert sample.reward == 3.0
    several = RewardConfig(fn=("numeric", f"{place}:closeness"), weights=(1.0, 0.2))
    samples = execute(workflow, ["13", "12", "x"], row, several, num_samples=3)
    parts = [{"numeric": 1.0, "correct": 1.0, "closeness": 1.0}, 0.5, 1 / 14]
    assert samples[0].reward == 1.2 and samples[0].reward_parts == parts[0]
    assert [sample.reward_parts["closeness"] for sample in samples[1:]] == parts[1:]


def test_the_example_workflows_run(execute, tmp_path):
    guess, tools = python_blocks("workflows.md")
    (agent,), (own,) = python_blocks("agents.md"), python_blocks("custom-workflows.md")
    named = (("guess", guess), ("tools", tools), ("agent", agent), ("own", own))
    for name, source in named:
        (tmp_path / f"{name}.py").write_text(source)

    workflow = load_workflow(f"{tmp_path}/guess.py:guessing")
    [sample] = execute(workflow, ["50", "25", "37"], {"answer": "37"})
    assert (sample.text, sample.reward, sample.finish) == ("50\n25\n37", 2.0, "stop")
    assert sample.reward_parts == {"correct": 1.0, "close": 1.0}
    assert sample.turns[:3] == (("assistant", "50"), ("user", "too high"), ("assistant", "25"))

    workflow = load_workflow(f"{tmp_path}/tools.py:tools")
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
    numeric = RewardConfig(fn="numeric")
    [sample] = execute(workflow, [call, "it is 42"], {"answer": "42"}, numeric)
    assert sample.reward == 1.0 and sample.text.endswith("it is 42")

    workflow = load_workflow("agent", f"{tmp_path}/agent.py:solve")
    [sample] = execute(workflow, ["41", "42"], {"answer": "42"})
    assert sample.reward == 1.0 and sample.text == "41\n42" and sample.num_sampled == 6
    [sample] = execute(workflow, ["42"], {"answer": "42"})
    assert sample.reward == 1.1 and sample.num_sampled == 3

    workflow = load_workflow(f"{tmp_path}/own.py:TwoTries")
    [sample] = execute(workflow, ["41", "42"], {"answer": "42"}, numeric)
    assert sample.reward == 1.0 and sample.num_sampled == 3


def test_the_pages_name_every_built_in_and_every_parameter():
    page = (DOCS / "rewards.md").read_text()
    assert all(f"| `{name}` |" in page for name in (*BUILT_IN, *PARAMETERS, *BATCHED))
