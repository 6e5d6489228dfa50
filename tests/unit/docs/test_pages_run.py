"""The blocks of every page run as they stand, in a folder that has what they name.

YAML goes through `plan`, Python and `pentad` lines are executed. The quickstart has a test of its
own. What is left out is in SKIPPED, with the reason.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.data.toy import write_byte_model
from pentad.models import families
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model
from pentad.planner.prepare import prepare
from pentad.rl.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SKIPPED = {
    "pentad serve ": "serves until it is stopped; tests/unit/serve starts it",
    "from openai import OpenAI": "asks such a server; tests/unit/serve does, with this package",
    "rollout.server.": "needs vLLM; tests/vllm",
    "VLLM_SERVER_DEV_MODE": "needs vLLM; tests/vllm",
    "pentad view": "serves until it is stopped; tests/unit/view starts it",
    "pentad convert ADAPTER": "tests/unit/weights/test_peft.py",
    "megatron:": "needs megatron-core; tests/megatron/test_megatron_runs.py",
    "pentad dpo dpo.yaml": "tests/unit/docs/test_preferences_page.py",
    "pentad reward-model dpo.yaml": "tests/unit/docs/test_preferences_page.py",
    "fn: reward_model": "tests/unit/docs/test_preferences_page.py",
    "pentad sft sft.yaml": "tests/unit/docs/test_sft_page.py",
    "pentad.train(recipe, reward=score": "tests/unit/docs/test_python_page.py",
    "pentad.load(": "tests/unit/docs/test_python_page.py",
    "pentad pretrain pretrain.yaml": "tests/unit/docs/test_pretraining_page.py",
    "pentad bench": "takes minutes; tests/unit/cli/test_bench.py runs parts of it",
    "from pentad.models.spec import ModelSpec": "tests/unit/models/test_adding_a_model.py",
    "def read_dims(": "tests/unit/models/test_adding_a_model.py",
    'model="my_phi3.py:SPEC"': "tests/unit/models/test_adding_a_model.py",
}
"""Part of a block or line -> why it is not run here, or where it is."""
TRAINED = "runs/checkpoints/me/sums/trial-0/default/epoch0epochstep5globalstep5"
MODELS = (
    *("models/m", "models/qwen3", "models/qwen3-0.6b", "models/Qwen3-0.6B", "models/Phi-3-mini"),
    *("path/to/Qwen3-0.6B", "models/Qwen3-8B"),
)
ROW = {"prompt": "1 + 1 =", "question": "1 + 1 =", "answer": "2", "response": "2"}
FOLLOWED = ("quickstart.md", "own-task.md", "before-a-run.md")
"""Pages that test_quickstart.py follows."""
OVERVIEWS = ("README.md", "cli.md")
"""Pages whose lines have placeholders."""
RECIPE = {
    "actor": {"path": "models/m"},
    "train_dataset": {"path": "data/sums.jsonl"},
    "valid_dataset": {"path": "data/sums.jsonl"},
    "reward": {"fn": "exact_match"},
    "gconfig": {"max_new_tokens": 8},
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            found.append(Block(page.name, line, match[1], match[2]))
    return [block for block in found if block.page not in FOLLOWED]


def code(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language and not skipped(block.code)]


def commands() -> list[Block]:
    """One for each line that begins with the command."""
    return [
        Block(block.page, block.line, "", line)
        for block in blocks()
        if block.language in ("", "bash")
        for line in block.code.splitlines()
        if line.startswith("pentad ") and not skipped(line)
    ]


def skipped(text: str) -> str:
    return next((part for part in SKIPPED if part in text), "")


def name(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """Everything that pages name, tiny."""
    root = tmp_path_factory.mktemp("scratch")
    write_byte_model(root / "tiny")
    model = create_model(dims_of(root / "tiny"), device="cpu", dtype=torch.float32, seed=1)
    save_model(model, root / "model", source_folder=root / "tiny", tokenizer_folder=root / "tiny")
    for place in (*MODELS, TRAINED):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).symlink_to(root / "model")
    for file in ("data/sums.jsonl", "gsm8k/test.jsonl"):
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text((json.dumps(ROW) + "\n") * 4)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), root / "data/test-0.parquet")
    (root / "steps.jsonl").write_text('{"step": 1, "rl": {"reward_mean": 0.5, "entropy": 1.0}}\n')
    (root / "recipe.yaml").write_text(json.dumps(RECIPE))
    for file, text in {
        "agents/solver.py": "async def solve(prompt): ...\n",
        "rewards/mine.py": "def score(completion): return 1.0\ncloseness = score\n",
        "my_phi3.py": "from pentad.models.families.llama import SPEC\n",
    }.items():
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text(text)
    return root


@pytest.mark.parametrize("block", code("yaml"), ids=name)
def test_recipes_are_planned(scratch, monkeypatch, block):
    monkeypatch.chdir(scratch)
    monkeypatch.setattr(families, "REGISTERED", {})
    (scratch / "block.yaml").write_text(block.code)
    given = [] if "path: models/" in block.code else ["actor.path=models/m"]
    prepare("block.yaml", [*given, "gconfig.max_new_tokens=8"], "plan")


@pytest.mark.parametrize("block", code("python"), ids=name)
def test_programs_run(scratch, monkeypatch, block):
    monkeypatch.chdir(scratch)
    known = dict(ALGORITHMS)
    try:
        exec(compile(block.code, name(block), "exec"), {"__name__": "page"})
    finally:
        for added in set(ALGORITHMS) - set(known):
            del ALGORITHMS[added]


@pytest.mark.slow
@pytest.mark.parametrize("block", commands(), ids=lambda block: block.code.split("  ")[0])
def test_commands_run(scratch, monkeypatch, block):
    """In the order of the page. Lines of the overview have placeholders: the command is there.
    Several processes convert in test_megatron_convert.py, here one."""
    monkeypatch.chdir(scratch)
    line = re.sub(r"--processes \d+", "--processes 1", block.code)
    words = shlex.split(line, comments=True)[1:]
    words = [words[0], "--help"] if block.page in OVERVIEWS else words
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{block.code}\n{result.output}"


def test_what_is_not_run_is_there_and_told(capsys):
    texts = [block.code for block in blocks()]
    unused = [part for part in SKIPPED if not any(part in text for text in texts)]
    assert unused == [], "nothing has to be left out for these any more"
    with capsys.disabled():
        for part, why in SKIPPED.items():
            print(f"\nnot run here: {part.strip()} ({why})", end="")
    assert len(code("yaml")) >= 6 and len(code("python")) >= 7 and len(commands()) >= 15
