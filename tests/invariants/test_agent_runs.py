"""An agent program trained through the config, with the `openai` package as its client."""

import pytest
from run_lab import steps_of, values_of

from pentad.core.errors import UserError

AGENT = """
from openai import AsyncOpenAI

async def sort(prompt, fields, base_url, api_key, model):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        first = await client.completions.create(model=model, prompt=prompt, max_tokens=4)
        text = first.choices[0].text
        again = await client.completions.create(model=model, prompt=prompt + "1", max_tokens=3)
    return sum(a == b for a, b in zip(text, fields["answer"])) / 4
"""


def test_an_agent_is_trained_by_what_it_was_answered(lab, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    settings = (
        "rollout.workflow=agent",
        f"rollout.agent={tmp_path}/agent.py:sort",
        "gconfig.n_samples=2",
        "train_dataset.batch_size=2",
        "total_train_steps=2",
        "reward.fn=null",
        "strict=true",
    )
    summary = lab.train(*settings)
    for record in steps_of(summary):
        assert record["num_groups"] == 2 and record["num_samples"] == 8  # two requests an episode
        assert record["rl"]["logprob_diff_max"] == 0.0
    assert values_of(lab.train(*settings)) == values_of(summary)


def test_an_agent_workflow_needs_its_agent_and_the_agent_its_workflow(lab, tmp_path):
    with pytest.raises(UserError, match="rollout.agent: is not set"):
        lab.train("rollout.workflow=agent")
    with pytest.raises(UserError, match="rollout.workflow = single_turn runs no agent"):
        lab.train("rollout.agent=some.module:solve")
    with pytest.raises(UserError, match="there is no file"):
        lab.train("rollout.workflow=agent", f"rollout.agent={tmp_path}/none.py:solve")
    with pytest.raises(UserError, match="cannot be loaded"):
        lab.train("rollout.workflow=agent", "rollout.agent=no.such.module:solve")
