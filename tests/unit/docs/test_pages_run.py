"""The blocks of every page run as they stand, in a folder that has what they name.

YAML goes through `plan`, Python and `pentad` lines are executed; runs that need several devices are
planned. What the quickstart's pages have is followed in test_quickstart.py. Every other line of a
block is in SKIPPED, OTHERS or OUTPUTS, with the reason or the test that has it, so that a new block
cannot be left out unseen.
"""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.cli.slots import run_slots
from pentad.data.toy import write_byte_model
from pentad.models import families
from pentad.models.families import dims_of
from pentad.models.registry import create_model, save_model
from pentad.planner.prepare import prepare
from pentad.rl.algorithms import FUNCTIONS
from pentad.rl.facts import FACTS
from pentad.runtime.slots import GroupNow, Slots

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SKIPPED = {
    "pentad serve ": "serves until it is stopped; tests/unit/serve starts it",
    "from openai import OpenAI": "asks such a server; tests/unit/serve does, with this package",
    "rollout.server.": "needs vLLM; tests/vllm",
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
    "pentad new-model phi3": "tests/unit/models/test_adding_a_model.py",
    "pentad verify-model my_phi3.py": "tests/unit/models/test_adding_a_model.py",
    "pentad verify-checkpoint": "tests/unit/checkpoint/test_verify_command.py",
    "pentad verify-parallel": "tests/unit/cli/test_verify_parallel.py",
    "pentad slots": "needs an elastic run; tests/dist/test_elastic.py",
    "pentad replay": "needs a run; tests/invariants/test_replay.py",
    "trial_name=sampled --only": "tests/invariants/test_one_sided_runs.py",
    "--groups-from": "tests/invariants/test_one_sided_runs.py",
    "pentad train recipe.yaml          #": "tests/invariants/test_killed_runs.py",
    "--resource": "tests/invariants/test_quick_start.py",
    "scheduler.type=ray": "needs Ray; tests/invariants/test_ray_runs.py",
    "scheduler.type=slurm": "submits a job; tests/dist/test_slurm.py",
    "models/OLMo-2-1B": "tests/unit/engine/test_hf_families.py trains one",
    "models/granite-3.3-2b": "tests/unit/trainer/test_hf_runs.py trains one",
    "train recipes/grpo.yaml": "tests/invariants/test_recipes.py",
    "pentad plan examples/archon_qwen3_moe.yaml": "tests/unit/plan/test_parallelism_page.py",
}
"""Part of a block or line -> why it is not run here, or where it is."""
PLANNED = ("allocation_mode=", "examples/math/sums.yaml")
"""Parts of `train` and `sft` lines that are planned here: they need devices or a large model."""
ROOM = ("cluster.n_gpus_per_node=16", "cluster.allow_idle=true", "--gpu-memory", "80")
OTHERS = {
    "make ": "a target of the Makefile (test_make_targets_exist)",
    "pip install": "extras exist (test_reference.py)",
    "source .venv/bin/activate": "after `make demo`; test_quickstart.py follows both",
    "docker ": "needs a builder; test_packaging.py",
    "python3.11 -m venv": "an environment of another program",
    "torchrun ": "several machines; tests/dist/test_lost_machines.py",
    "scripts/launch.sh": "tests/dist/test_lost_machines.py",
    "PENTAD_FAULT=": "tests/unit/core/test_fault_points.py",
    "vllm.entrypoints": "needs vLLM; tests/vllm",
    "export PYTHONPATH=tests/megatron_cpu": "needs megatron-core; tests/megatron",
    "python examples/math/sums.py": "the fixture scratch runs it",
    "read_dims=ConfigReader": "an excerpt of a model file; pentad verify-model runs all of them",
}
"""Lines of a shell that are not commands of pentad: part -> where they are tested, or why not."""
OUTPUTS = {
    "sft first-sft": "test_sft_page.py",
    "dpo first-dpo": "test_preferences_page.py",
    "pretrain first-pretrain": "test_pretraining_page.py",
    "problems, nothing was started": "tests/unit/config/test_config_reference.py",
    "Qwen/Qwen3-30B-A3B: 30.53 B": "tests/unit/plan/test_parallelism_page.py",
    "e2 must divide d*c*t": "tests/unit/plan/test_parallelism_page.py",
    "qwen3_moe: 4 layers, width 48": "tests/unit/cli/test_verify_parallel.py",
    "logits at tp 1: differs": "tests/unit/models/test_adding_a_model.py",
    "--world 6: archon:(attn:d6|ffn:e6)": "test_commands_run compares it",
    "generation 0: archon:d4 on 4 of 4": "test_slots_are_shown_as_on_the_page",
    "was 0.001 so far, and the training depends": "tests/unit/config/test_resume_rules.py",
    "training resumed: a step ended": "tests/dist/test_elastic.py makes the line",
    "merged in bfloat16": "tests/unit/weights/test_peft.py",
    "every byte  part": "tests/unit/checkpoint/test_verify_command.py",
    "numbers are equal to the record": "tests/invariants/test_replay.py",
    "sglang:d4t4+archon:(attn": "an allocation, parsed by tests/unit/core/test_layout.py",
    "{fileroot}/logs/": "a path; tests/unit/telemetry/test_runfolder.py",
}
"""Shown outputs: part -> the test that has the same text."""
TRAINED = "runs/checkpoints/me/sums/trial-0/default/epoch0epochstep5globalstep5"
MODELS = (
    *("models/m", "models/qwen3", "models/qwen3-0.6b", "models/Qwen3-0.6B", "models/Phi-3-mini"),
    *("path/to/Qwen3-0.6B", "models/Qwen3-8B"),
)
ROW = {"prompt": "1 + 1 =", "question": "1 + 1 =", "answer": "2", "response": "2"}
FOLLOWED = (
    "quickstart.md",
    "quickstart-environments.md",
    "own-task.md",
    "before-a-run.md",
)
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
    shown: str = ""
    """The output that the page shows after it."""


FENCED = r"^```(\w*)\n(.*?)^```$"
INDENTED = r"(?<=\n\n)((?: {4}[^\n]*\n|\n(?= {4}))+)"


def blocks() -> list[Block]:
    """Fenced blocks, and indented ones, which have no language. Pages indent nothing else."""
    found = []
    for page in (page for page in PAGES if page.name not in FOLLOWED):
        text = page.read_text()
        ends = [0]
        for match in re.finditer(f"{FENCED}|{INDENTED}", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            language, code = match[1] or "", match[2] or match[3]
            found.append(Block(page.name, line, language, code))
            between = text[ends[-1] : match.start()]
            if language == "text" and len(found) > 1 and not between.strip():
                found[-2] = replace(found[-2], shown=code)
            ends.append(match.end())
    return found


def code(language: str) -> list[Block]:
    return [block for block in blocks() if block.language == language and not skipped(block.code)]


def shell_lines() -> list[Block]:
    """One for each line of a shell, continued lines joined, the output with the last."""
    found = []
    for block in (block for block in blocks() if block.language in ("", "bash")):
        lines = re.sub(r"\\\n\s*", "", block.code).splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        for number, line in enumerate(lines, 1):
            shown = block.shown if number == len(lines) else ""
            found.append(Block(block.page, block.line, "", line, shown))
    return found


def commands() -> list[Block]:
    """Lines of the program that are run or planned here."""
    lines = [line for line in shell_lines() if line.code.startswith("pentad ")]
    return [line for line in lines if not skipped(line.code)]


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
    (root / "examples").symlink_to(ROOT / "examples")
    (root / "SmolLM2-135M-Instruct").symlink_to(root / "model")
    (root / "megatron/qwen3").mkdir(parents=True)
    making = [sys.executable, ROOT / "examples/math/sums.py", root / "runs/sums"]
    subprocess.run(making, check=True)
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
    known = dict(FACTS)
    try:
        exec(compile(block.code, name(block), "exec"), {"__name__": "page"})
    finally:
        for added in set(FACTS) - set(known):
            del FACTS[added], FUNCTIONS[added]


@pytest.mark.slow
@pytest.mark.parametrize("block", commands(), ids=lambda block: block.code.split("  ")[0])
def test_commands_run(scratch, monkeypatch, block):
    """In the order of the page. Lines of the overview have placeholders: the command is there.
    Several processes convert in test_megatron_convert.py, here one."""
    monkeypatch.chdir(scratch)
    line = re.sub(r"--processes \d+", "--processes 1", block.code)
    words = shlex.split(line, comments=True)[1:]
    words = [words[0], "--help"] if block.page in OVERVIEWS else words
    if any(part in line for part in PLANNED) and words[0] in ("train", "sft"):
        words = ["plan", *words[1:], *ROOM]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{block.code}\n{result.output}"
    printed = " ".join(result.output.split())
    for shown in (line for line in block.shown.splitlines() if line != "..."):
        assert " ".join(shown.split()) in printed, shown


def test_slots_are_shown_as_on_the_page(tmp_path, capsys):
    (block,) = [block for block in blocks() if block.code.startswith("pentad slots")]
    slots = Slots(tmp_path / "slots")
    slots.write_now(GroupNow(4, (0, 1, 2, 3), 0, "archon:d4"))
    run_slots(str(tmp_path), [2], [])
    assert capsys.readouterr().out == block.shown


def test_every_block_is_run_or_has_its_place_here():
    """So a new page cannot bring a block that no test looks at."""
    odd = [name(b) for b in blocks() if b.language not in ("", "bash", "text", "python", "yaml")]
    assert odd == []
    others = [line for line in shell_lines() if not line.code.startswith("pentad ")]
    assert [line for line in others if not any(part in line.code for part in OTHERS)] == []
    shown = [block for block in blocks() if block.language == "text"]
    assert [name(b) for b in shown if not any(part in b.code for part in OUTPUTS)] == []
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {line.code.split()[1] for line in others if line.code.startswith("make ")}
    assert named and named <= made


def test_what_is_not_run_is_there_and_told(capsys):
    texts = [block.code for block in blocks()]
    for table in (SKIPPED, OTHERS, OUTPUTS):
        unused = [part for part in table if not any(part in text for text in texts)]
        assert unused == [], "nothing has to be left out for these any more"
        files = {file for why in table.values() for file in re.findall(r"tests/[\w/]+\.py", why)}
        assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
    with capsys.disabled():
        for part, why in SKIPPED.items():
            print(f"\nnot run here: {part.strip()} ({why})", end="")
    assert len(code("yaml")) >= 6 and len(code("python")) >= 7 and len(commands()) >= 25
