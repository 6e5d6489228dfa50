"""Tools reach the policy in whole runs: of rows, of workflows, of agents, trained and evaluated."""

import json

import pytest
from typer.testing import CliRunner

from pentad.cli import main as cli
from pentad.core.errors import UserError
from pentad.data.tokenizer import load_tokenizer
from pentad.data.toy import write_byte_model
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model
from pentad.rollout.environments import schema_of
from pentad.telemetry.steps import read_lines

HEAD = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
HEAD += "<|im_end|>\n{% endif %}"
WORKFLOW = """
from pentad.rollout.environments import ToolEnvironment
from pentad.rollout.workflows import MultiTurn

async def multiply(a: int, b: int):
    "The product."
    return str(a * b)

def tools():
    return MultiTurn(lambda: ToolEnvironment({"multiply": multiply}), role="tool")

def untold():
    return MultiTurn(lambda: ToolEnvironment({"multiply": multiply}), role="tool", tools=())
"""
AGENT = """
from openai import AsyncOpenAI

async def ask(messages, fields, base_url, api_key, model):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        given = {"model": model, "messages": messages, "tools": fields["tools"]}
        await client.chat.completions.create(**given)
    return 1.0
"""
USER = {"role": "user", "content": "6*7="}


async def multiply(a: int, b: int):
    "The product."


async def search(query: str):
    "Looks it up."


SEARCH, MULTIPLY = schema_of(search), schema_of(multiply)


@pytest.fixture
def model(tmp_path):
    """With a template that shows tools."""
    write_byte_model(tmp_path / "bytes")
    template = tmp_path / "bytes" / "chat_template.jinja"
    template.write_text(HEAD + template.read_text())
    return tmp_path / "bytes"


def keys(folder, model, *more, rows=({"m": [USER], "answer": "42", "tools": [SEARCH]},)):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "flows.py").write_text(WORKFLOW)
    (folder / "agent.py").write_text(AGENT)
    return (
        f"actor.path={model}",
        f"train_dataset.path={folder}/rows.jsonl",
        "train_dataset.messages_key=m",
        "train_dataset.batch_size=1",
        "total_train_steps=1",
        *more,
    )


RUNS = {
    "single_turn": ([SEARCH], ["reward.fn=exact_match"]),
    "flows.py:tools": ([MULTIPLY, SEARCH], ["reward.fn=exact_match"]),
    "flows.py:untold": ([SEARCH], ["reward.fn=exact_match"]),
    "agent": ([SEARCH], ["reward.fn=null", "rollout.agent={folder}/agent.py:ask"]),
}


@pytest.mark.parametrize("workflow", RUNS)
def test_a_policy_is_trained_on_prompts_that_show_its_tools(lab, model, tmp_path, workflow):
    tools, more = RUNS[workflow]
    spec = f"{tmp_path}/{workflow}" if ":" in workflow else workflow
    words = [f"rollout.workflow={spec}", "gconfig.n_samples=2", *more]
    given = [word.format(folder=tmp_path) for word in words]
    summary = lab.train(*keys(tmp_path, model, *given))
    tokenizer = load_tokenizer(model)
    expected = tokenizer.render([USER], for_answer=True, tools=tools)
    assert all(json.dumps(tool["function"]["name"]) in expected for tool in tools)
    lines = read_lines(summary.records / "samples.jsonl")
    assert lines
    for line in lines:
        asked = line["ids"][: line["trained_spans"][0][0]]
        assert tokenizer.decode(asked, keep_special=True) == expected


def test_a_template_that_shows_no_tools_is_refused_before_anything_starts(lab, tmp_path):
    write_byte_model(tmp_path / "bytes")
    words = keys(tmp_path, tmp_path / "bytes", "reward.fn=exact_match", "gconfig.n_samples=2")
    with pytest.raises(UserError, match=r"does not show the row's tools \(search\)"):
        lab.train(*words)
    with pytest.raises(UserError, match=r"does not show the row's tools \(search\)"):
        lab.sft(*keys(tmp_path, tmp_path / "bytes", rows=[{"m": ANSWERED, "tools": [SEARCH]}]))
    rows, flow = [{"m": [USER], "answer": "42"}], f"rollout.workflow={tmp_path}/flows.py:tools"
    with pytest.raises(UserError, match="does not show tools, and the workflow has multiply"):
        lab.train(*keys(tmp_path, tmp_path / "bytes", flow, *words[-2:], rows=rows))
    given = keys(tmp_path, tmp_path / "bytes", flow, "reward.fn=exact_match", rows=rows)
    done = CliRunner().invoke(cli.app, ["reward", *given])
    assert done.exit_code == 2 and "the workflow has multiply" in done.stderr, "as training would"


ANSWERED = [USER, {"role": "assistant", "content": "42"}]


def test_examples_are_trained_after_their_tools(lab, model, tmp_path):
    summary = lab.sft(*keys(tmp_path, model, rows=[{"m": ANSWERED, "tools": [SEARCH]}]))
    (record, *_) = [r for r in read_lines(summary.records / "steps.jsonl") if "step" in r]
    tokenizer = load_tokenizer(model)
    whole = tokenizer.encode(tokenizer.render(ANSWERED, for_answer=False, tools=[SEARCH]).rstrip())
    assert record["num_tokens"] == len(whole)


def test_an_evaluation_asks_with_the_tools_of_its_rows(model, tmp_path):
    made = create_model(dims_of(model), seed=3)
    save_model(made, tmp_path / "m", source_folder=model, tokenizer_folder=model)
    keys(tmp_path, model)
    words = ["eval", f"{tmp_path}/m", "--data", f"{tmp_path}/rows.jsonl", "--messages-key", "m"]
    words += ["--reward", "exact_match", "--max-new-tokens", "2", "--out", f"{tmp_path}/out.jsonl"]
    done = CliRunner().invoke(cli.app, [*words, "--device", "cpu"])
    assert done.exit_code == 0, done.stderr
    (line, *_) = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = load_tokenizer(model).render([USER], for_answer=True, tools=[SEARCH])
    assert line["prompt"] == expected


ENVIRONMENT = '''
class Length:
    def reset(self, answer: str, **row):
        self.reward = 0.0
        return f" It has {len(answer)} digits."

    def look(self, place: int) -> str:
        """Shows a digit.

        Args:
            place: Which one.
        """
        self.reward = 1.0
        return "4"
'''


def test_an_environment_class_is_trained(lab, model, tmp_path):
    (tmp_path / "length.py").write_text(ENVIRONMENT)
    rows = [{"m": [USER], "answer": "42"}]
    flow = [f"rollout.workflow=class:{tmp_path}/length.py:Length", "gconfig.n_samples=2"]
    summary = lab.train(*keys(tmp_path, model, *flow, "reward.fn=null", rows=rows))
    for line in read_lines(summary.records / "samples.jsonl"):
        assert "6*7= It has 2 digits." in line["prompt"] and '"name": "look"' in line["prompt"]
        assert (line["reward"], line["reward_parts"]) == (0.0, {"environment": 0.0})
    with pytest.raises(UserError, match="has neither get_reward\\(\\) nor a number reward"):
        (tmp_path / "bare.py").write_text(ENVIRONMENT.replace("self.reward = ", "self.other = "))
        flow[0] = f"rollout.workflow=class:{tmp_path}/bare.py:Length"
        lab.train(*keys(tmp_path, model, *flow, "reward.fn=null", rows=rows))
