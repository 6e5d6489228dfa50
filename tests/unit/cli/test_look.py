"""`pentad plan` reads data, rewards and workflows, and reports what a start would report."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.core.errors import UserError
from pentad.data.toy import write_byte_model
from pentad.planner.prepare import prepare
from pentad.trainer.look import FIRST_ROWS, look
from pentad.trainer.preflight import check_train
from pentad.trainer.rank.example_service import SftService
from pentad.trainer.rank.preference_service import PreferenceService
from pentad.trainer.sources.examples import check_examples

GOOD = {"prompt": "1 + 1", "answer": "2", "response": "2"}
FILES = {
    "ok.jsonl": [GOOD, GOOD],
    "column.jsonl": [{"question": "1 + 1", "answer": "2"}],
    "number.jsonl": [{"prompt": 3, "answer": "2"}],
    "unanswered.jsonl": [GOOD, {"prompt": "2 + 2"}],
    "long.jsonl": [GOOD | {"prompt": "1" * 2000}],
    "messages.jsonl": [{"messages": [{"role": "user"}], "answer": "2"}],
}
TEXTS = {
    "empty.jsonl": "",
    "broken.jsonl": json.dumps(GOOD) + '\n{"prompt": oh}\n',
    "list.jsonl": "[1]\n",
    "rows.csv": "prompt,answer\n1,2\n",
    "typo.py": "import nump\n\n\ndef score(completion, answer):\n    return 1.0\n",
    "lacks.py": "def score(completion, solution):\n    return 1.0\n",
    "fails.py": "def score(completion, answer):\n    return 1 / 0\n",
    "text.py": "def score(completion, answer):\n    return 'high'\n",
    "flow.py": "class Flow:\n    def run(self):\n        pass\n",
}
DATA = {
    "column.jsonl": 'column.jsonl:1: there is no "prompt"; the row has answer, question',
    "number.jsonl": 'number.jsonl:1: "prompt" holds a int, not text.',
    "unanswered.jsonl": "1 of 2 rows have none, the first at unanswered.jsonl:2",
    "long.jsonl": "all 1 prompts are longer than 1016 tokens",
    "empty.jsonl": "it has no rows",
    "broken.jsonl": "broken.jsonl:2: not JSON",
    "list.jsonl": "list.jsonl:1: holds a list",
    "rows.csv": "rows.csv has no known ending",
}
TRAIN = {
    "held-out": (["valid_dataset.path=broken.jsonl"], "broken.jsonl:2: not JSON"),
    "messages": (
        ["train_dataset.path=messages.jsonl", "train_dataset.messages_key=messages"],
        'message 1 of "messages" has no "content"',
    ),
    "import": (["reward.fn=typo.py:score"], "No module named 'nump'"),
    "function": (["reward.fn=lacks.py:scored"], "(it defines score)"),
    "columns": (["reward.fn=lacks.py:score"], "it requires 'solution', and rows have no such"),
    "raises": (["reward.fn=fails.py:score"], "ZeroDivisionError: division by zero"),
    "result": (["reward.fn=text.py:score"], "it returned 'high' where a number"),
    "workflow": (["rollout.workflow=flow.py:Flow"], "Flow has no coroutine `run`"),
    "class": (["rollout.workflow=flow.py:Flaw"], "has no attribute 'Flaw' (it defines Flow)"),
    "agent": (["rollout.workflow=agent", "rollout.agent=flow.py:play"], "rollout.agent = flow.py"),
    "template": (["template_args.thinking=true"], "does not read thinking"),
}
ON_EXAMPLES = {
    "sft": ([], "unanswered.jsonl", 'unanswered.jsonl:2: there is no "response"'),
    "dpo": (["preference.loss=dpo"], "ok.jsonl", 'ok.jsonl:1: there is no "chosen"'),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_byte_model(tmp_path / "model")
    for name, rows in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def recipe(*overrides, fn="exact_match"):
    scored = [] if fn is None else [f"reward.fn={fn}", "gconfig.max_new_tokens=8"]
    model = ["actor.path=model", "actor.init_from_scratch=true", "train_dataset.batch_size=2"]
    return [*model, "train_dataset.path=ok.jsonl", *scored, *overrides]


def said(call) -> list[str]:
    with pytest.raises(UserError) as caught:
        call()
    return sorted(map(str, caught.value.problems))


def planned(overrides) -> list[str]:
    config, _ = prepare(None, overrides, "plan")
    return sorted(map(str, look(config).checks.problems))


def started(overrides, command="train") -> list[str]:
    config, _ = prepare(None, overrides, command)
    service = {"sft": SftService, "dpo": PreferenceService}.get(command)
    check = check_train if service is None else partial(check_examples, service)
    return said(lambda: check(config, torch.device("cpu")))


@pytest.mark.parametrize("name", DATA)
def test_a_plan_and_a_start_say_the_same_of_data(folder, name):
    overrides = recipe(f"train_dataset.path={name}")
    found = planned(overrides)
    assert any(DATA[name] in one for one in found), found
    assert found == started(overrides)


@pytest.mark.parametrize("case", TRAIN)
def test_a_plan_and_a_start_say_the_same_of_code_and_tokens(folder, case):
    more, sentence = TRAIN[case]
    overrides = recipe(*more)
    found = planned(overrides)
    assert any(sentence in one for one in found), found
    assert found == started(overrides)


@pytest.mark.parametrize("command", ON_EXAMPLES)
def test_a_plan_reads_examples_as_their_command_does(folder, command):
    more, name, sentence = ON_EXAMPLES[command]
    overrides = recipe(f"train_dataset.path={name}", *more, fn=None)
    found = planned(overrides)
    assert any(sentence in one for one in found), found
    assert found == started(overrides, command)


def test_only_the_first_rows_are_read(folder):
    """What follows them is left to the start, also where all that was read is too long."""
    rows = [FILES["long.jsonl"][0]] * FIRST_ROWS
    lines = [json.dumps(row) for row in rows] + [json.dumps(GOOD), "no row"]
    Path("many.jsonl").write_text("\n".join(lines) + "\n")
    config, _ = prepare(None, recipe("train_dataset.path=many.jsonl"), "plan")
    found = look(config)
    assert found.checks.problems == []
    (line,) = [line for line in found.read if "many.jsonl" in line]
    assert f"the first {FIRST_ROWS} rows, {FIRST_ROWS} left out: too_long" in line
    assert any(
        "many.jsonl:258: not JSON" in one
        for one in started(recipe("train_dataset.path=many.jsonl"))
    )


def test_without_the_tokenizer_rows_and_rewards_are_still_read(folder):
    """A public model's sizes are known, its tokenizer is not here: no lengths, no template."""
    chat = ["actor.path=Qwen/Qwen3-0.6B", "actor.init_from_scratch=false"]
    chat += ["train_dataset.messages_key=messages"]
    Path("talk.jsonl").write_text(
        json.dumps(
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 1"}]}],
                "answer": "2",
                "tools": [{"type": "function", "function": {"name": "add"}}],
            }
        )
    )
    config, _ = prepare(None, recipe(*chat, "train_dataset.path=talk.jsonl"), "plan")
    found = look(config)
    assert found.checks.problems == [] and "its one row" in found.read[0]
    (note,) = found.not_read
    assert note.startswith("the tokenizer of actor.path = Qwen/Qwen3-0.6B is not on this machine")
    bad = [*chat, "train_dataset.path=messages.jsonl", "reward.fn=typo.py:score"]
    first, second = planned(recipe(*bad))
    assert first.startswith('messages.jsonl:1: message 1 of "messages" has no "content"')
    assert "No module named 'nump'" in second


def test_what_is_not_here_is_a_line_of_the_plan(folder):
    """Its process starts for code that is here, and for none if nothing is."""
    away = ["actor.path=Qwen/Qwen3-0.6B", "actor.init_from_scratch=false", "--gpu-memory", "80"]
    away += ["train_dataset.path=away.jsonl", "valid_dataset.path=gone.jsonl"]
    done = CliRunner().invoke(app, ["plan", *recipe(*away)])
    assert done.exit_code == 0, done.output
    assert "- not looked at: train_dataset.path = away.jsonl is not on this machine" in done.output
    assert "- not looked at: valid_dataset.path = gone.jsonl is not on this machine" in done.output


def test_data_that_a_run_here_would_miss_are_problems(folder):
    """Unless the plan is for another machine; all are reported with those of the reward."""
    words = ["train_dataset.path=away.jsonl", "valid_dataset.path=gone-*.jsonl"]
    done = CliRunner().invoke(app, ["plan", *recipe(*words, "reward.fn=typo.py:score")])
    assert done.exit_code == 2 and "3 problems, nothing was started" in done.output
    elsewhere = "for a run on another machine give --gpu-memory"
    missing = "there is no such file or folder; check the path, or give a name of the hub"
    assert f"train_dataset.path = away.jsonl: {missing}" in done.output
    pattern = "valid_dataset.path = gone-*.jsonl: no file fits this pattern; check the pattern"
    assert f"{pattern}; {elsewhere}." in done.output
    assert "reward.fn = typo.py:score" in done.output
    nodes = ["cluster.n_nodes=2", "cluster.n_gpus_per_node=1", "allocation_mode=archon:d2"]
    done = CliRunner().invoke(app, ["plan", *recipe(words[0], *nodes, fn=None)])
    assert done.exit_code == 0 and "not looked at: train_dataset.path = away" in done.output


def test_a_dataset_of_the_hub_is_not_called_a_missing_file(folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = CliRunner().invoke(app, ["plan", *recipe("train_dataset.path=no/such:main:train")])
    assert done.exit_code == 0, done.output
    line = "- not looked at: train_dataset.path = no/such:main:train is not downloaded"
    assert line in done.output and "no such file" not in done.output


def test_a_plan_assumes_the_lengths_that_it_read(folder):
    """The memory is that of the data; what max_length says comes first."""
    rows = [GOOD | {"prompt": "1" * 20}, GOOD]
    Path("twenty.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = recipe("train_dataset.path=twenty.jsonl")
    done = CliRunner().invoke(app, ["plan", *words])
    note = "train_dataset.max_length is unset: prompts of 20 tokens assumed, as the longest that"
    assert note in " ".join(done.output.split()), done.output
    assert "each at most 20 + 8 tokens" in done.output
    done = CliRunner().invoke(app, ["plan", *words, "train_dataset.max_length=30"])
    assert "each at most 30 + 8 tokens" in done.output and "max_length is unset" not in done.output
    done = CliRunner().invoke(app, ["plan", *recipe("train_dataset.path=twenty.jsonl", fn=None)])
    assert "rows of 22 tokens assumed, as the longest that was read" in " ".join(
        done.output.split()
    ), done.output


def test_a_broken_reward_is_reported_once_with_its_line(folder):
    (folder / "broken.py").write_text("import json\n\n\ndef score(completion:\n    return 1\n")
    (folder / "late.py").write_text("import json\nX = json.loads('{')\n")
    for name, line in (
        ("broken.py", "line 4: def score(completion:"),
        ("late.py", "(late.py, line 2: X = json.loads('{'))"),
    ):
        (one,) = planned(recipe(f"reward.fn={name}:score"))
        assert one.startswith(f"reward.fn = {name}:score: it cannot be imported ("), one
        assert line in one and one.endswith("try it alone with: pentad reward RECIPE."), one
    done = CliRunner().invoke(app, ["plan", *recipe("reward.fn=none.py:score")])
    assert "1 problem, nothing was started" in done.output
    assert "reward.fn = none.py:score: there is no file none.py; check the path." in done.output


def test_problems_of_data_and_rules_come_together(folder):
    """In one message, from a process without torch; with --json the inputs are listed."""
    words = recipe(
        "train_dataset.path=broken.jsonl", "gconfig.top_p=0.9", "reward.fn=typo.py:score"
    )
    code = "import sys\nfrom pentad.cli.main import app\ntry:\n    app()\nfinally:\n"
    code += "    print('HEAVY', sorted({'torch', 'numpy'} & set(sys.modules)))"
    command = [sys.executable, "-c", code, "plan"]
    done = subprocess.run([*command, *recipe(*words)], capture_output=True, text=True)
    assert done.returncode == 2 and "HEAVY []" in done.stdout
    assert "3 problems, nothing was started" in done.stderr
    for sentence in ("broken.jsonl:2: not JSON", "gconfig.top_p = 0.9", "No module named 'nump'"):
        assert sentence in done.stderr
    done = subprocess.run([*command, *recipe(), "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout.partition("HEAVY")[0])
    assert found["inputs"] == {
        "read": [
            "train_dataset.path = ok.jsonl: all 2 rows, prompts of 5 to 5 tokens",
            "reward.fn = exact_match: imported and tried on a row",
        ],
        "not_read": [],
    }


def test_a_key_that_is_wrong_silences_the_data_that_depend_on_it(folder):
    words = recipe("train_dataset.prompt_kex=question", "train_dataset.path=column.jsonl")
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == 2 and "1 problem, nothing was started" in done.output
    assert "did you mean train_dataset.prompt_key?" in done.output


def test_models_are_not_asked(folder):
    judge = ["reward.fn=[exact_match,judge]", "reward.weights=[1,0.5]", "reward.on_failure=drop"]
    judge += ["reward.judge.url=http://127.0.0.1:9/v1", "reward.judge.model=m"]
    judge += ["reward.judge.template='{completion}'"]
    config, _ = prepare(None, recipe(*judge), "plan")
    found = look(config)
    assert found.checks.problems == []
    assert found.not_read == ["reward.fn = judge: a plan calls no model"]
