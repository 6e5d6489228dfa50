"""How a command that trains goes from its recipe to its last line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import typer

from pentad.cli.errors import BAD_INPUT
from pentad.cli.recipe import Recipe
from pentad.cli.slurm import submit_job
from pentad.core.errors import UserError

if TYPE_CHECKING:
    from pentad.config.schema import Config
    from pentad.core.errors import Problem
    from pentad.trainer.run import RunSummary

Run = Literal["train", "sft", "pretrain"]


def run_command(recipe: Recipe, command: Run, fresh: bool) -> None:
    config, notes = prepare_run(recipe, command)
    if config.scheduler.type == "slurm":
        submit_job(config, command, notes, fresh)
        return
    if command == "train" and config.only == "rollout":
        from pentad.trainer.rollout_only import run_rollout_only

        sampled = run_rollout_only(config, notes, fresh)
        typer.echo(f"{sampled.num_steps} steps sampled. Records: {sampled.records}")
        words = f"--only train --groups-from {sampled.records}"
        typer.echo(f"Groups: {sampled.groups} ({words} trial_name={config.trial_name}-trained)")
        return
    from pentad.trainer.assemble import run_train
    from pentad.trainer.sft import run_pretrain, run_sft
    from pentad.trainer.train_only import run_train_only

    train = run_train if config.only is None else run_train_only
    run = {"train": train, "sft": run_sft, "pretrain": run_pretrain}[command]
    show_summary(keep_running(run, config, notes, fresh))


def prepare_run(recipe: Recipe, command: Run) -> tuple[Config, list[str]]:
    """The config; under torchrun all ranks find the same problems, and rank 0 tells them."""
    from pentad.runtime.rank import rank_from_environment

    def ask_start(config: Config) -> list[Problem | str]:
        from pentad.trainer.ranks import start_problems_here

        return start_problems_here(config, samples=command == "train")

    own = rank_from_environment()
    try:
        return recipe.prepare(command, ask_start=ask_start)
    except UserError:
        if own is not None and own.rank > 0:
            raise typer.Exit(BAD_INPUT) from None
        raise


def keep_running(
    run: Callable[[Config, list[str], bool], RunSummary],
    config: Config,
    notes: list[str],
    fresh: bool,
) -> RunSummary:
    """Runs it; after a failure that may pass, this program is replaced by one that goes on."""
    from pentad.trainer.preflight import is_again
    from pentad.trainer.retries import start_again

    try:
        return run(config, notes, fresh and not is_again())
    except Exception as error:
        start_again(config, error)
        raise


def show_summary(summary: RunSummary) -> None:
    typer.echo(f"{summary.num_steps} steps done. Records: {summary.records} (see its README.md)")
    typer.echo(f"Model: {summary.model} (after step {summary.num_steps}; folders count from 0)")
