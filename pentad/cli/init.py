"""`pentad init`: writes a folder with a recipe, a reward or environment, and data, ready to run."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from pentad.core.errors import Problem, raise_problems
from pentad.core.hub import HUB_NAME
from pentad.core.machine import find_gpus

TINY = "tiny"
NUM_TRAIN, NUM_VALID, NUM_WARM = 2048, 128, 1024
NUM_TRIES = 20
REAL_ROWS = 512
"""Training rows for models larger than tiny."""


@dataclass(frozen=True, slots=True)
class FirstTask:
    """A kind of task: description, file to copy, recipe keys, and a function that generates a row
    of data."""

    says: str
    draw: Callable[[random.Random], dict[str, Any]]
    keys: tuple[str, ...]
    file: str = ""
    command: str = "train"
    warm: Callable[[random.Random], dict[str, Any]] | None = None
    """Generates a row for the tiny model's warm-up; None: it starts from random weights."""
    warm_steps: int = 50
    """Steps of the warm-up, after which some answers are right."""
    is_chat: bool = False
    """Whether prompts use the chat template for the tiny model, too."""
    tiny_batch: int = 16
    """Prompts a step of the tiny model."""
    tiny_steps: int = 64
    tiny_caution: str = ""
    """Reason why the tiny model cannot learn the task, and the remedy; empty if it can."""


def _digits(rng: random.Random) -> dict[str, Any]:
    digits = "".join(rng.choices("0123456789", k=5))
    return {"prompt": f"Sort the digits of {digits}: ", "answer": "".join(sorted(digits))}


def _answered(draw: Callable[[random.Random], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wraps `draw` so that rows have their answers as responses, for supervised fine-tuning."""

    def row(rng: random.Random) -> dict[str, Any]:
        drawn = draw(rng)
        return {"prompt": drawn["prompt"], "response": drawn["answer"]}

    return row


def _sum(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return {"prompt": f"What is {a} + {b}? Answer: ", "answer": str(a + b)}


def _digit(rng: random.Random) -> dict[str, Any]:
    return {"prompt": "I think of a digit. Guess: ", "answer": str(rng.randint(0, 9))}


def _game(rng: random.Random) -> dict[str, Any]:
    """A conversation of the game in environment.py; every second guess halves the range."""
    secret, low, high = rng.randint(0, 9), 0, 9
    messages = [{"role": "user", "content": _digit(rng)["prompt"]}]
    for _ in range(4):
        guess = (low + high) // 2 if rng.random() < 0.5 else rng.randint(0, 9)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == secret:
            break
        is_low = guess < secret
        low, high = (max(low, guess + 1), high) if is_low else (low, min(high, guess - 1))
        messages.append({"role": "user", "content": "higher" if is_low else "lower"})
    while messages[-1]["role"] == "user":
        messages.pop()
    return {"messages": messages}


def _program(rng: random.Random) -> dict[str, Any]:
    name, sign = rng.choice([("add", "+"), ("subtract", "-"), ("multiply", "*")])
    inputs = [[rng.randint(1, 9), rng.randint(1, 9)] for _ in range(3)]
    outputs = [{"+": a + b, "-": a - b, "*": a * b}[sign] for a, b in inputs]
    prompt = f"Write the Python function {name}(a, b) that returns a {sign} b.\n"
    return {"prompt": prompt, "answer": {"fn_name": name, "inputs": inputs, "outputs": outputs}}


OWN_REWARD = 'reward: {fn: "reward.py:score"}  # your own function, in this folder'
SANDBOX = "reward: {fn: code}  # runs the program on the tests of column `answer`, isolated"
ENVIRONMENT = 'rollout: {workflow: "environment.py:workflow"}  # several turns, and the reward'
TASKS = {
    "math": FirstTask(
        "GRPO on sorting digits, scored by a function",
        _digits,
        (OWN_REWARD,),
        "reward.py",
        warm=_answered(_digits),
        tiny_steps=300,
    ),
    "code": FirstTask(
        "GRPO on small programs, scored by tests",
        _program,
        (SANDBOX,),
        tiny_caution="The tiny model writes no programs: its reward stays 0, and the run only "
        "shows the steps. To learn, name a model: --model Qwen/Qwen3-0.6B",
    ),
    "agent": FirstTask(
        "GRPO over several turns with an environment",
        _digit,
        (ENVIRONMENT,),
        "environment.py",
        warm=_game,
        warm_steps=200,
        is_chat=True,
        tiny_batch=8,
        tiny_steps=200,
    ),
    "sft": FirstTask(
        "Supervised fine-tuning on given answers",
        _answered(_sum),
        (),
        command="sft",
        tiny_steps=256,
    ),
}


def run_init(folder: str | None, task: str | None, model: str | None, device: str | None) -> None:
    """Prompts for missing options on a terminal, writes the folder, prints the next commands."""
    if sys.stdin.isatty():
        folder = folder or typer.prompt("Folder", default="mytask")
        task = task or typer.prompt(f"Task ({', '.join(TASKS)})", default="math")
        what = f"Model (a hub name, a folder, or {TINY}: made here, random weights)"
        model = model or typer.prompt(what, default=TINY)
        device = device or typer.prompt("Device (auto, cpu, cuda)", default="auto")
    task, model, device = task or "math", model or TINY, device or "auto"
    raise_problems(_problems(folder, task, model, device))
    assert folder is not None, "checked above"
    place, starter = Path(folder).expanduser(), TASKS[task]
    has_gpu = device == "cuda" or (device == "auto" and bool(find_gpus()))
    text = recipe_of(starter, place.resolve().name, model, has_gpu)
    place.mkdir(parents=True, exist_ok=True)
    if starter.file:
        source = files("pentad.cli") / "starters" / starter.file
        (place / starter.file).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    _write_data(place, starter)
    if model == TINY:
        _make_tiny(place / "model", starter)
    (place / "recipe.yaml").write_text(text, encoding="utf-8")
    _say_next(folder, starter, model == TINY)


def _make_tiny(folder: Path, task: FirstTask) -> None:
    """Writes the tiny model with random weights, or after a short supervised fine-tuning."""
    from pentad.data.toy import write_byte_model

    write_byte_model(folder)
    if task.warm is None:
        return
    import torch

    from pentad.planner.prepare import prepare
    from pentad.trainer.sources.examples import run_sft

    torch.set_num_threads(1)  # the model is too small to share between cores
    print(
        f"tiny: {task.warm_steps} steps of supervised fine-tuning, so that some answers are right"
    )
    with TemporaryDirectory() as root:
        rows = Path(root) / "rows.jsonl"
        _write_rows(rows, _rows_of(random.Random(2), task.warm, NUM_WARM, set()))
        config, notes = prepare(
            None,
            [
                *("experiment_name=tiny", f"fileroot={root}", f"actor.path={folder.resolve()}"),
                *("actor.init_from_scratch=true", "actor.gradient_checkpointing=false"),
                *("actor.optimizer.lr=2.0e-3", f"train_dataset.path={rows}"),
                *("train_dataset.batch_size=32", f"total_train_steps={task.warm_steps}"),
                "train_dataset."
                + ("messages_key=messages" if task.is_chat else "chat_template=false"),
                "allocation_mode=archon:d1",
            ],
            "sft",
        )
        summary = run_sft(config, notes, device="cpu")
        shutil.copytree(summary.model, folder, dirs_exist_ok=True)


def _problems(folder: str | None, task: str, model: str, device: str) -> Iterator[Problem]:
    if folder is None:
        yield Problem("FOLDER", "there is no terminal for a prompt", "give one: pentad init mytask")
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


def recipe_of(task: FirstTask, name: str, model: str, has_gpu: bool) -> str:
    """The text of the recipe: sizes for the model and device, and only the keys to change first."""
    is_tiny = model == TINY
    num_samples, new_tokens, batch = (
        (16, 8, task.tiny_batch) if is_tiny else (8, 256, 32) if has_gpu else (4, 64, 4)
    )
    num_steps = task.tiny_steps if is_tiny else REAL_ROWS // batch
    has_template = task.is_chat if is_tiny else _has_template(model)
    template = f", chat_template: {str(has_template).lower()}"
    samples = task.command == "train"
    columns = "prompt, and what the reward reads" if samples else "prompt and response"
    sizes = f"n_samples: {num_samples}, max_new_tokens: {new_tokens}"
    for_rl = [
        "algorithm: {name: grpo}  # or dr_grpo, dapo, rloo, gspo, ppo, ...",
        f"gconfig: {{{sizes}}}  # answers per prompt, tokens per answer",
    ]
    if "qwen3" in model.lower():
        for_rl.append("template_args: {enable_thinking: false}  # answers without thinking")
    caution = textwrap.wrap(task.tiny_caution, 94) if is_tiny else []
    lines = [
        f"# {task.says}.",
        *(f"# {line}" for line in caution),
        f"# Check it: pentad plan recipe.yaml. Run it: pentad {task.command} recipe.yaml",
        f"experiment_name: {re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}",
        *_model_lines(model, task),
        f"train_dataset: {{path: train.jsonl, batch_size: {batch}{template}}}  # rows: {columns}",
        "valid_dataset: {path: valid.jsonl}  # rows that are never trained on",
        *task.keys,
        *(for_rl if samples else []),
        f"evaluator: {{freq_steps: {50 if is_tiny else 16}}}  # steps between evaluations on "
        "valid_dataset",
        f"total_train_steps: {num_steps}",
    ]
    return "\n".join(lines) + "\n"


def _model_lines(model: str, task: FirstTask) -> list[str]:
    if model == TINY:
        return _tiny_lines(task)
    rate = "1.0e-6" if task.command == "train" else "1.0e-5"
    path = str(Path(model).expanduser().resolve()) if _is_folder(model) else model
    path = json.dumps(path) if set(path) & set(" :#") else path
    where = "a model folder, or a name on the hub such as Qwen/Qwen3-0.6B"
    return ["actor:", f"  path: {path}  # {where}", f"  optimizer: {{lr: {rate}}}"]


def _tiny_lines(task: FirstTask) -> list[str]:
    """Recipe lines of the tiny model, with a learning rate for its size."""
    scratch = "  init_from_scratch: true  # random weights; leave it out for a model with weights"
    rate = "4.0e-4" if task.warm else "1.0e-3"
    later = "1.0e-6" if task.command == "train" else "1.0e-5"
    return [
        "actor:",
        "  path: model  # tiny, made here; later a folder, or a hub name such as Qwen/Qwen3-0.6B",
        *([] if task.warm else [scratch]),
        "  gradient_checkpointing: false  # leave this out for a larger model",
        f"  optimizer: {{lr: {rate}, lr_scheduler_type: linear}}  # {later} for a model of 0.6 B",
    ]


def _write_data(folder: Path, task: FirstTask) -> None:
    rng, seen = random.Random(1), set[str]()
    for name, count in (("train", NUM_TRAIN), ("valid", NUM_VALID)):
        _write_rows(folder / f"{name}.jsonl", _rows_of(rng, task.draw, count, seen))


def _rows_of(
    rng: random.Random,
    draw: Callable[[random.Random], dict[str, Any]],
    count: int,
    seen: set[str],
) -> Iterator[str]:
    """Yields rows as JSON, without repetition as long as there are enough different ones."""
    for _ in range(count):
        drawn = [json.dumps(draw(rng))]
        while drawn[-1] in seen and len(drawn) < NUM_TRIES:
            drawn.append(json.dumps(draw(rng)))
        seen.add(drawn[-1])
        yield drawn[-1]


def _write_rows(file: Path, rows: Iterable[str]) -> None:
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")


def _say_next(folder: str, task: FirstTask, is_tiny: bool) -> None:
    print(f"{task.says}, in {folder}:")
    print("  recipe.yaml    model, data and sizes of the run")
    if task.file:
        print(f"  {task.file:<14} the reward; write your own here")
    print("  train.jsonl, valid.jsonl    sample data; replace it with yours")
    if is_tiny:
        print("  model/         the tiny model; for another one set actor.path in recipe.yaml")
    if is_tiny and task.tiny_caution:
        print(task.tiny_caution)
    print("Next:")
    print(f"  cd {folder}")
    print("  pentad plan recipe.yaml     checks it and estimates its memory")
    print(f"  pentad {task.command} recipe.yaml")
