"""`pentad init`: writes a folder with a recipe, a reward or environment, and data, which runs at
once."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer

from pentad.core.errors import Problem, UserError
from pentad.core.hub import HUB_NAME
from pentad.core.machine import find_gpus

TINY = "tiny"
NUM_TRAIN, NUM_VALID = 512, 64


@dataclass(frozen=True, slots=True)
class FirstTask:
    """A kind of task: its description, the file to copy, its keys, and a function that makes a row
    of data."""

    says: str
    draw: Callable[[random.Random], dict[str, Any]]
    keys: tuple[str, ...]
    file: str = ""
    command: str = "train"


def _sum(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return {"prompt": f"What is {a} + {b}? Answer: ", "answer": str(a + b)}


def _sum_by_imitation(rng: random.Random) -> dict[str, Any]:
    row = _sum(rng)
    return {"prompt": row["prompt"], "response": row["answer"]}


def _digit(rng: random.Random) -> dict[str, Any]:
    return {"prompt": "I think of a digit. Guess: ", "answer": str(rng.randint(0, 9))}


def _program(rng: random.Random) -> dict[str, Any]:
    name, sign = rng.choice([("add", "+"), ("subtract", "-"), ("multiply", "*")])
    inputs = [[rng.randint(1, 9), rng.randint(1, 9)] for _ in range(3)]
    outputs = [{"+": a + b, "-": a - b, "*": a * b}[sign] for a, b in inputs]
    prompt = f"Write the Python function {name}(a, b) that returns a {sign} b.\n"
    return {"prompt": prompt, "answer": {"fn_name": name, "inputs": inputs, "outputs": outputs}}


OWN_REWARD = 'reward: {fn: "reward.py:score"}  # a function of your own, in this folder'
SANDBOX = "reward: {fn: code}  # runs the program on the tests of column `answer`, isolated"
ENVIRONMENT = 'rollout: {workflow: "environment.py:workflow"}  # several turns, and the reward'
TASKS = {
    "math": FirstTask("GRPO on sums, scored by a function", _sum, (OWN_REWARD,), "reward.py"),
    "code": FirstTask("GRPO on small programs, scored by tests", _program, (SANDBOX,)),
    "agent": FirstTask(
        "GRPO over several turns with an environment",
        _digit,
        (ENVIRONMENT,),
        "environment.py",
    ),
    "sft": FirstTask(
        "Supervised fine-tuning on given answers", _sum_by_imitation, (), command="sft"
    ),
}


def run_init(folder: str | None, task: str | None, model: str | None, device: str | None) -> None:
    """Asks for missing options if there is a terminal, writes the folder, prints the next
    commands."""
    if sys.stdin.isatty():
        folder = folder or typer.prompt("Folder", default="mytask")
        task = task or typer.prompt(f"Task ({', '.join(TASKS)})", default="math")
        what = f"Model (a hub name, a folder, or {TINY}: made here, random weights)"
        model = model or typer.prompt(what, default=TINY)
        device = device or typer.prompt("Device (auto, cpu, cuda)", default="auto")
    task, model, device = task or "math", model or TINY, device or "auto"
    if problems := list(_problems(folder, task, model, device)):
        raise UserError(problems)
    assert folder is not None, "checked above"
    place, starter = Path(folder).expanduser(), TASKS[task]
    text = recipe_of(starter, place.resolve().name, model, _has_gpu(device))
    place.mkdir(parents=True, exist_ok=True)
    if starter.file:
        source = files("pentad.cli") / "starters" / starter.file
        (place / starter.file).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    _write_rows(place, starter)
    if model == TINY:
        from pentad.data.toy import write_byte_model

        write_byte_model(place / "model")
    (place / "recipe.yaml").write_text(text, encoding="utf-8")
    _say_next(folder, starter)


def _problems(folder: str | None, task: str, model: str, device: str) -> Iterator[Problem]:
    if folder is None:
        yield Problem("FOLDER", "there is no terminal to ask on", "give one: pentad init mytask")
    elif (place := Path(folder).expanduser()).exists() and not place.is_dir():
        yield Problem(f"FOLDER = {folder}", "is a file", "give the name of a new folder")
    elif place.is_dir() and any(place.iterdir()):
        remedy = "give the name of a new folder, or of an empty one"
        yield Problem(f"FOLDER = {folder}", "is not empty, and nothing is overwritten", remedy)
    if task not in TASKS:
        yield Problem(f"--task = {task}", "there is no such task", f"give one of {_of(TASKS)}")
    if model != TINY and not _is_folder(model) and not HUB_NAME.fullmatch(model):
        rule = "neither a folder with a config.json nor a name on the hub"
        remedy = f"give OWNER/NAME such as Qwen/Qwen3-0.6B, a folder, or {TINY}"
        yield Problem(f"--model = {model}", rule, remedy)
    if device not in ("auto", "cpu", "cuda"):
        yield Problem(f"--device = {device}", "no such device", "give auto, cpu or cuda")


def _of(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


def _is_folder(model: str) -> bool:
    return (Path(model).expanduser() / "config.json").is_file()


def _has_template(model: str) -> bool:
    """Whether the tokenizer in a folder has a chat template; a Hub name is assumed to have one."""
    if not _is_folder(model):
        return True
    folder = Path(model).expanduser()
    settings = folder / "tokenizer_config.json"
    is_inside = settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")
    return is_inside or (folder / "chat_template.jinja").is_file()


def _has_gpu(device: str) -> bool:
    return device == "cuda" or (device == "auto" and bool(find_gpus()))


def recipe_of(task: FirstTask, name: str, model: str, has_gpu: bool) -> str:
    """The recipe: sizes for the model and the device, and only keys that a beginner changes."""
    is_tiny = model == TINY
    num_samples, new_tokens, batch = (
        (8, 8, 8) if is_tiny else (8, 256, 32) if has_gpu else (4, 64, 4)
    )
    template = ", chat_template: true" if not is_tiny and _has_template(model) else ""
    samples = task.command == "train"
    columns = "prompt, and what the reward reads" if samples else "prompt and response"
    sizes = f"n_samples: {num_samples}, max_new_tokens: {new_tokens}"
    for_rl = [
        "algorithm: {name: grpo}  # or dr_grpo, dapo, rloo, gspo, ppo, ...",
        f"gconfig: {{{sizes}}}  # answers per prompt, tokens per answer",
    ]
    if "qwen3" in model.lower():
        for_rl.append("template_args: {enable_thinking: false}  # answers without thinking")
    lines = [
        f"# {task.says}.",
        f"# Check it: pentad plan recipe.yaml. Run it: pentad {task.command} recipe.yaml",
        f"experiment_name: {re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}",
        *_model_lines(model, samples),
        f"train_dataset: {{path: train.jsonl, batch_size: {batch}{template}}}  # rows: {columns}",
        "valid_dataset: {path: valid.jsonl}  # rows that are never trained on",
        *task.keys,
        *(for_rl if samples else []),
        "evaluator: {freq_steps: 16}  # steps between evaluations on valid_dataset",
        f"total_train_steps: {NUM_TRAIN // batch}",
    ]
    return "\n".join(lines) + "\n"


def _model_lines(model: str, samples: bool) -> list[str]:
    is_tiny = model == TINY
    rate = "1.0e-3" if is_tiny else "1.0e-6" if samples else "1.0e-5"
    path = "model" if is_tiny else model
    if not is_tiny and _is_folder(model):
        path = str(Path(model).expanduser().resolve())
    path = json.dumps(path) if set(path) & set(" :#") else path
    where = "a model folder, or a name on the hub such as Qwen/Qwen3-0.6B"
    scratch = "  init_from_scratch: true  # random weights; leave it out for a model with weights"
    rate_line = f"  optimizer: {{lr: {rate}}}"
    return ["actor:", f"  path: {path}  # {where}", *([scratch] * is_tiny), rate_line]


def _write_rows(folder: Path, task: FirstTask) -> None:
    rng = random.Random(1)
    for name, count in (("train", NUM_TRAIN), ("valid", NUM_VALID)):
        rows = (json.dumps(task.draw(rng)) for _ in range(count))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _say_next(folder: str, task: FirstTask) -> None:
    print(f"{task.says}, in {folder}:")
    print("  recipe.yaml    model, data and sizes of the run")
    if task.file:
        print(f"  {task.file:<14} the reward; write your own here")
    print("  train.jsonl, valid.jsonl    sample data; replace it with yours")
    print("Next:")
    print(f"  cd {folder}")
    print("  pentad plan recipe.yaml     checks it and estimates its memory")
    print(f"  pentad {task.command} recipe.yaml")
