"""`pentad demo`: trains a tiny model to sort digits by reinforcement learning, on this machine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.resources import as_file, files
from pathlib import Path

import torch
from rich.console import Console

from pentad.cli.runs import page_beside
from pentad.config.load import load_config
from pentad.config.schema import Config
from pentad.core.device import pick_device
from pentad.core.errors import Problem, UserError
from pentad.core.folders import read_object
from pentad.core.machine import user_name
from pentad.data.toy import write_model, write_task
from pentad.planner.prepare import prepare
from pentad.telemetry.runfolder import run_path
from pentad.trainer.context import RunSummary
from pentad.trainer.sources.examples import run_sft
from pentad.trainer.sources.rollouts import run_train

NUM_TRAIN, NUM_SFT, NUM_VALID = 8000, 2000, 500
DEFAULT_STEPS = 250
"""Steps of reinforcement learning without `--steps`."""


def run_demo(
    *, seed: int, fileroot: str, device: str, steps: int | None = None, fresh: bool = False
) -> None:
    """Runs the demo. An interrupted demo is resumed; a complete one starts from the beginning."""
    console = Console(highlight=False, soft_wrap=True)
    chosen = pick_device(device)
    # The model is too small for several cores, and with one thread results are bitwise repeatable.
    torch.set_num_threads(1)
    # Users, and seeds, must not overwrite each other's data.
    root = Path(fileroot) / "demo" / user_name() / f"seed{seed}"
    console.print(
        f"[bold]Pentad demo[/] on {chosen}, seed {seed}: a tiny Qwen3 learns to sort five digits.\n"
        f"1/3 making a tokenizer, a model config and data in {Path(fileroot) / 'demo'}"
    )
    write_model(root / "model")
    write_task(root, seed=seed, num_train=NUM_TRAIN, num_sft=NUM_SFT, num_valid=NUM_VALID)
    common = [f"fileroot={fileroot}", f"trial_name=seed{seed}", f"seed={seed}"]
    console.print("2/3 a short warm-up by supervised fine-tuning, so that some answers are right")
    config, notes = prepare(
        recipe("demo_sft.yaml"),
        [*common, f"actor.path={root / 'model'}", f"train_dataset.path={root / 'sft.jsonl'}"],
        "sft",
    )
    fresh = fresh or is_complete(config)
    if not fresh:
        check_steps(config, steps)
    warm = run_sft(config, notes, fresh=fresh, device=str(chosen))
    console.print("3/3 reinforcement learning: the reward is all it sees")
    config, notes = prepare(
        recipe("demo_grpo.yaml"),
        [
            *common,
            f"total_train_steps={DEFAULT_STEPS if steps is None else steps}",
            f"actor.path={warm.model}",
            f"train_dataset.path={root / 'train.jsonl'}",
            f"valid_dataset.path={root / 'valid.jsonl'}",
        ],
        "train",
    )
    with live_page(config, console):
        summary = run_train(config, notes, fresh=fresh, device=str(chosen))
    console.print(closing(summary))


def live_page(config: Config, console: Console) -> AbstractContextManager[None]:
    """Serves the page of the run during the run, if the extra `serve` is installed."""
    try:
        import pentad.cli.view  # noqa: F401
    except UserError as error:
        console.print(f"    without a live page: {error}")
        return nullcontext()
    return page_beside(config)


def is_complete(config: Config) -> bool:
    """Whether this user's last demo with this seed is complete; `config`: the config of its
    warm-up."""
    file = run_path(config.fileroot, "demo-grpo", config.trial_name, config.user) / "exit.json"
    return file.exists() and read_object(file).get("end") == "complete"


def check_steps(config: Config, steps: int | None) -> None:
    """Raises UserError if an interrupted demo would be resumed with another number of steps.
    `config`: the config of its warm-up."""
    folder = run_path(config.fileroot, "demo-grpo", config.trial_name, config.user)
    if not (folder / "config.yaml").exists():
        return
    given = DEFAULT_STEPS if steps is None else steps
    begun = load_config(folder / "config.yaml").total_train_steps
    if begun == given:
        return
    where = f"--steps = {given}" + (" (the default)" if steps is None else "")
    rule = (
        f"the demo in {folder} was interrupted and has {begun} steps, which set its learning rate"
    )
    again = "" if steps is None else f" --steps {steps}"
    remedy = f"continue it with --steps {begun}, or start over with{again} --fresh"
    raise UserError(Problem(where, rule, remedy))


def recipe(name: str) -> Path:
    with as_file(files("pentad.cli") / "recipes" / name) as path:
        return path


def closing(summary: RunSummary) -> str:
    """The last output: the files of the run, then the result."""
    before, after = summary.evals[0], summary.evals[-1]
    return "\n".join(
        [
            "",
            "[bold]Look at[/]",
            f"  pentad view {summary.records}    curves, samples, times: a local page",
            f"  {summary.records}/README.md    every file of the run, explained",
            f"  {summary.records}/steps.jsonl  one record a step",
            f"  {summary.records}/samples.jsonl  the model's answers",
            f"  {summary.model}  the model; transformers loads it:",
            f'    AutoModelForCausalLM.from_pretrained("{summary.model}")',
            "[bold]Try next[/]",
            f"  pentad train {summary.records}/config.yaml trial_name=mine algorithm.name=rloo",
            "  pentad init mytask    a recipe, a reward and sample data for a task of your own",
            "  pentad plan --help    what a recipe needs, before it runs",
            "",
            f"held-out accuracy: {before['accuracy']:.3f} before RL, {after['accuracy']:.3f} after "
            f"{summary.num_steps} steps ({after['num_prompts']} prompts never trained on)",
        ]
    )
