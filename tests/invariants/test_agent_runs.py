"""An agent program trained through the config, with the `openai` package as its client."""

import json

import pytest
from run_lab import steps_of, values_of

from pentad.core.errors import RunError, UserError
from pentad.data.tokenizer import load_tokenizer
from pentad.data.toy import write_byte_model
from pentad.telemetry.steps import read_lines
from pentad.trainer.saving.batches import read_batch

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


def test_an_agent_program_is_run_greedily_whatever_it_asks_for(lab, tmp_path):
    """Its two requests name a temperature; greedily they give one answer in every run."""
    program = AGENT.replace("max_tokens", "temperature=1.0, max_tokens")
    (tmp_path / "agent.py").write_text(program.replace("/ 4", '/ 4 + len(fields["answer"])'))
    words = ("rollout.workflow=agent", f"rollout.agent={tmp_path}/agent.py:sort", "strict=true")
    still = ("actor.optimizer.lr=1e-12", "reward.fn=null", "total_train_steps=2")
    few, rows = tmp_path / "few.jsonl", (lab.task / "train.jsonl").read_text().splitlines()
    few.write_text("\n".join(rows[:8]))
    sizes = ("train_dataset.batch_size=8", "gconfig.max_sampled_tokens=8")
    names = ("algorithm.name=remax", "gconfig.n_samples=2", f"train_dataset.path={few}")
    run = lab.train(*names, *words, *still, *sizes)
    by_prompt = [
        {
            group.samples[0].ids[:5].tobytes(): group.greedy
            for group in read_batch(run.records / "batches", step).groups
        }
        for step in (1, 2)
    ]
    assert by_prompt[0] == by_prompt[1] and len(by_prompt[0]) == 8, "with other seeds"
    for step in steps_of(run):
        assert step["num_samples"] == 32 and step["rl"]["reward_greedy"] >= 5
        assert step["rl"]["logprob_diff_max"] == 0.0


CHATTING = """
from openai import AsyncOpenAI

USER = {"role": "user"}

async def chat(%s, base_url, api_key, model):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = %s
        answer = await client.chat.completions.create(model=model, messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": "again"})
        await client.chat.completions.create(model=model, messages=messages)
    return float(len(answer.choices[0].message.content)) / 10
"""
SYSTEM, USER = {"role": "system", "content": "be brief"}, {"role": "user", "content": "6*7="}


@pytest.mark.parametrize(
    ("taken", "sent", "row", "setting", "heads"),
    [
        ("prompt", "[dict(USER, content=prompt)]", {"prompt": "6*7="}, "chat_template=true", 2),
        ("messages", "messages", {"prompt": "6*7="}, "chat_template=true", 2),
        ("messages", "messages", {"m": [SYSTEM, USER]}, "messages_key=m", 3),
    ],
)  # fmt: skip
def test_an_agent_sees_the_chat_template_once(lab, tmp_path, taken, sent, row, setting, heads):
    write_byte_model(tmp_path / "bytes")
    (tmp_path / "agent.py").write_text(CHATTING % (taken, sent))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    summary = lab.train(
        f"actor.path={tmp_path}/bytes",
        f"train_dataset.path={tmp_path}/rows.jsonl",
        f"train_dataset.{setting}",
        "rollout.workflow=agent",
        f"rollout.agent={tmp_path}/agent.py:chat",
        "gconfig.n_samples=2",
        "train_dataset.batch_size=1",
        "total_train_steps=1",
        "reward.fn=null",
    )
    tokenizer = load_tokenizer(tmp_path / "bytes")
    lines = read_lines(summary.records / "samples.jsonl")
    assert lines
    for line in lines:
        asked = line["ids"][: line["trained_spans"][0][0]]
        seen = tokenizer.decode(asked, keep_special=True)
        opening = [SYSTEM, USER] if "m" in row else [USER]
        assert seen == tokenizer.render(opening, for_answer=True)
        assert seen.count("<|im_start|>") == heads and seen.count("6*7=") == 1
        assert line["prompt"] == seen  # what people read is what the model saw
        first, second = line["trained_spans"]
        between = tokenizer.decode(line["ids"][first[1] : second[0]], keep_special=True)
        assert between.endswith("<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")


def test_an_agent_that_takes_a_text_is_not_given_half_of_a_conversation(lab, tmp_path):
    write_byte_model(tmp_path / "bytes")
    (tmp_path / "agent.py").write_text(CHATTING % ("prompt", "[]"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"m": [SYSTEM, USER]}) + "\n")
    with pytest.raises(
        RunError, match=r"takes `prompt`, but a row is a conversation \(system, user"
    ):
        lab.train(
            f"actor.path={tmp_path}/bytes",
            f"train_dataset.path={tmp_path}/rows.jsonl",
            "train_dataset.messages_key=m",
            "rollout.workflow=agent",
            f"rollout.agent={tmp_path}/agent.py:chat",
            "train_dataset.batch_size=1",
            "reward.fn=null",
        )


def test_an_agent_workflow_needs_its_agent_and_the_agent_its_workflow(lab, tmp_path):
    with pytest.raises(UserError, match="rollout.agent: is not set"):
        lab.train("rollout.workflow=agent")
    with pytest.raises(UserError, match="rollout.workflow = single_turn runs no agent"):
        lab.train("rollout.agent=some.module:solve")
    with pytest.raises(UserError, match="there is no file"):
        lab.train("rollout.workflow=agent", f"rollout.agent={tmp_path}/none.py:solve")
    with pytest.raises(UserError, match="cannot be loaded"):
        lab.train("rollout.workflow=agent", "rollout.agent=no.such.module:solve")
