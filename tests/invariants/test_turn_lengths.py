"""Several turns: one limit bounds what a sample draws, its penalty and its constant norm."""

import pytest
from run_lab import steps_of

from pentad.core.errors import RunError, UserError
from pentad.data.toy import write_byte_model
from pentad.telemetry.steps import read_lines
from pentad.trainer.rank.update import BatchUpdate

FLOWS = """
from pentad.rollout.environments import Step
from pentad.rollout.workflows import MultiTurn, Transcript


class Talk:
    async def reset(self, fields):
        self.turns = 0

    async def step(self, text):
        self.turns += 1
        return Step("1", is_done=self.turns == 5, reward_parts={"length": float(len(text) % 3)})

    async def close(self):
        pass


def talking():
    return MultiTurn(Talk, max_turns=5)


class Careless:
    async def run(self, prompt, sampler, context):
        samples = []
        for i in range(context.num_samples):
            transcript = Transcript(prompt.ids)
            for turn in range(4):
                seed = context.seed(prompt.gid, i) + turn
                [answer] = await sampler.generate(context.request(transcript.ids, [seed]))
                transcript.add_sampled(answer)
            samples.append(transcript.finished(answer.finish, "x"))
        return samples
"""


@pytest.fixture
def flows(tmp_path):
    file = tmp_path / "flows.py"
    file.write_text(FLOWS)
    return file


def trained_batches(monkeypatch):
    """(samples, rows) of every batch that is trained."""
    seen, real = [], BatchUpdate.finish

    def finish(self):
        result = real(self)
        seen.append(([sample for sample, _ in result.scored], result.rows))
        return result

    monkeypatch.setattr(BatchUpdate, "finish", finish)
    return seen


def test_the_limit_of_a_sample_bounds_all_its_turns_and_divides_its_loss(lab, flows, monkeypatch):
    batches = trained_batches(monkeypatch)
    summary = lab.train(
        f"rollout.workflow={flows}:talking",
        "reward.fn=null",
        "algorithm.name=dr_grpo",
        "gconfig.max_new_tokens=4",
        "gconfig.max_sampled_tokens=7",
        "telemetry.samples_per_step=16",
    )
    longest = max(record["rl"]["length_max"] for record in steps_of(summary))
    assert 4 < longest <= 7, "more than a turn, and no more than the sample's limit"
    weights = {
        round(float(w), 6)
        for _, rows in batches
        for row in rows
        for w in row.columns["weights"]
        if w
    }
    assert weights == {round(1 / 7, 6)}
    cut = [
        line for line in read_lines(summary.records / "samples.jsonl") if line["num_sampled"] == 7
    ]
    assert all(line["finish"] == "length" for line in cut)


def test_the_overlong_penalty_counts_all_turns_against_the_limit_of_the_sample(
    lab, flows, monkeypatch
):
    batches = trained_batches(monkeypatch)
    lab.train(
        f"rollout.workflow={flows}:talking",
        "reward.fn=null",
        "algorithm.name=reinforce",
        "algorithm.overlong_penalty=0.5",
        "algorithm.overlong_buffer=3",
        "gconfig.max_new_tokens=4",
        "gconfig.max_sampled_tokens=7",
    )
    lengths = {sample.num_sampled for samples, _ in batches for sample in samples}
    assert 7 in lengths and min(lengths) < 7, "some are punished in full, some are not"
    for samples, rows in batches:
        worth = [s.reward - 0.5 * max(0, s.num_sampled - 4) / 3 for s in samples]
        mean = sum(worth) / len(worth)
        for sample, row, own in zip(samples, rows, worth, strict=True):
            got = row.columns["advantages"].numpy()[sample.mask]
            assert got == pytest.approx(own - mean, abs=1e-6)


AGENT = """
from openai import AsyncOpenAI

async def talk(messages, base_url, api_key, model):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for turn in range(2):
            answer = await client.chat.completions.create(model=model, messages=messages)
            text = answer.choices[0].message.content
            messages = [*messages, {"role": "assistant", "content": text}]
            messages.append({"role": "user", "content": "again"})
    return float(len(text) % 3)
"""


def test_the_limit_of_a_sample_bounds_all_answers_an_agent_is_given(lab, tmp_path, monkeypatch):
    write_byte_model(tmp_path / "bytes")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "6*7="}\n')
    batches = trained_batches(monkeypatch)
    lab.train(
        f"actor.path={tmp_path}/bytes",
        f"train_dataset.path={tmp_path}/rows.jsonl",
        "train_dataset.chat_template=true",
        "train_dataset.batch_size=1",
        "rollout.workflow=agent",
        f"rollout.agent={tmp_path}/agent.py:talk",
        "reward.fn=null",
        "algorithm.name=dr_grpo",
        "gconfig.max_new_tokens=6",
        "gconfig.max_sampled_tokens=8",
        "total_train_steps=1",
    )
    [(samples, rows)] = batches
    lengths = [sample.num_sampled for sample in samples]
    assert 6 < max(lengths) <= 8, "more than an answer, and no more than the sample's limit"
    weights = {round(float(w), 6) for row in rows for w in row.columns["weights"] if w}
    assert weights == {round(1 / 8, 6)}


def test_without_a_limit_of_the_sample_lengths_are_not_measured(lab, flows):
    with pytest.raises(UserError, match="gconfig.max_sampled_tokens = null with rollout.workflow"):
        lab.train(f"rollout.workflow={flows}:talking", "reward.fn=null", "algorithm.name=dapo")


def test_a_workflow_that_draws_more_is_named(lab, flows):
    with pytest.raises(
        (RunError, UserError), match="gconfig.max_sampled_tokens = 7: context.request"
    ):
        lab.train(f"rollout.workflow={flows}:Careless", "gconfig.max_sampled_tokens=7")
