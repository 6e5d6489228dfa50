"""Runs a training command from its recipe to its summary, here or as a Slurm job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pentad.cli.errors import BAD_INPUT
from pentad.cli.recipe import Recipe
from pentad.core.errors import Problem, UserError

if TYPE_CHECKING:
    from pentad.config.rules.rule import RunCommand, RunFacts
    from pentad.config.schema import Config
    from pentad.trainer.context import RunSummary


SMOKE_STEPS = 5


def run_command(
    recipe: Recipe,
    command: RunCommand,
    fresh: bool,
    *,
    view: bool = False,
    most_steps: int | None = None,
) -> None:
    """Runs a command. `view`: serves the page of the run. `most_steps`: limits the number of
    steps."""
    config, notes = prepare_run(recipe, command)
    given = config.total_train_steps
    if most_steps is not None and (given is None or given > most_steps):
        config = config.model_copy(update={"total_train_steps": most_steps})
        said = "" if given is None else f" in place of {given}"
        notes = [*notes, f"total_train_steps = {most_steps}{said}: --smoke"]
    with page_beside(config) if view else nullcontext():
        _run(config, command, notes, fresh)


def _run(config: Config, command: RunCommand, notes: list[str], fresh: bool) -> None:
    if config.scheduler.type == "slurm":
        submit_job(config, command, notes, fresh)
        return
    if command == "train" and config.only == "rollout":
        from pentad.trainer.sources.rollout_only import run_rollout_only

        sampled = run_rollout_only(config, notes, fresh)
        typer.echo(f"{sampled.num_steps} steps sampled. Records: {sampled.records}")
        words = f"--only train --groups-from {sampled.records}"
        typer.echo(f"Groups: {sampled.model} ({words} trial_name={config.trial_name}-trained)")
        return
    from pentad.trainer.sources.examples import ON_EXAMPLES
    from pentad.trainer.sources.kept_groups import run_train_only
    from pentad.trainer.sources.rollouts import run_train

    train = run_train if config.only is None else run_train_only
    run = train if command == "train" else ON_EXAMPLES[command]
    show_summary(run(config, notes, fresh))


@contextmanager
def page_beside(config: Config) -> Iterator[None]:
    """Serves the page of a run during the run; only rank 0 does."""
    if config.scheduler.type == "slurm":
        rule = "--view shows only runs on this machine"
        remedy = "leave it out, and open the records with `pentad view` when the job runs"
        raise UserError(Problem("scheduler.type = slurm", rule, remedy))
    from pentad.cli.view import view_beside
    from pentad.runtime.rank import rank_from_environment

    own = rank_from_environment()
    child = view_beside(config) if own is None or own.rank == 0 else None
    try:
        yield
    finally:
        if child is not None:
            child.end()


def prepare_run(recipe: Recipe, command: RunCommand) -> tuple[Config, list[str]]:
    """The prepared config and notes; under torchrun, only rank 0 reports problems."""
    from pentad.runtime.rank import rank_from_environment

    def here(config: Config) -> RunFacts:
        from pentad.trainer.preflight import facts_here

        return facts_here(config, command)

    own = rank_from_environment()
    try:
        return recipe.prepare(command, facts_here=here)
    except UserError:
        if own is not None and own.rank > 0:
            raise typer.Exit(BAD_INPUT) from None
        raise


def show_summary(summary: RunSummary) -> None:
    typer.echo(f"{summary.num_steps} steps done. Records: {summary.records} (see its README.md)")
    typer.echo(f"Model: {summary.model} (after step {summary.num_steps}; folders count from 0)")


def submit_job(config: Config, command: str, notes: list[str], fresh: bool) -> None:
    """Submits a Slurm job. The config is copied beside the script, so that later edits of the
    recipe do not change the job."""
    from pentad.config.load import dump_config
    from pentad.config.resolve import replaced
    from pentad.config.topology import topology
    from pentad.runtime.slurm import SlurmJob, submit, write_script

    trial = "-".join((config.user or "user", config.experiment_name, config.trial_name))
    folder = Path(config.fileroot).absolute() / "slurm" / re.sub(r"[^\w.-]", "-", trial)
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "config.yaml"
    recipe.write_text(dump_config(replaced(config, "scheduler.type", "local")))
    cluster, placed = config.cluster, topology(config)
    job = SlurmJob(
        name=f"{config.experiment_name}-{config.trial_name}",
        folder=folder,
        num_nodes=cluster.n_nodes,
        num_train_nodes=placed.num_train_nodes,
        ranks_per_node=len(placed.learners) // placed.num_train_nodes,
        agent_nodes=tuple(sorted({one.node for one in placed.elsewhere if one.node})),
        gpus_per_node=cluster.n_gpus_per_node,
        cpus_per_node=cluster.n_cpus_per_node,
        memory_gb_per_node=cluster.memory_gb_per_node,
        command=(command, str(recipe)),
        first_only=("--fresh",) if fresh else (),
        work_folder=Path.cwd(),
    )
    path = write_script(job)
    if job.gpus_per_node is None:
        notes = [*notes, "cluster.n_gpus_per_node is unset: the job requests no GPUs"]
    for note in notes:
        typer.echo(f"note: {note}")
    said = submit(path)
    if said is None:
        typer.echo(f"There is no sbatch on the path. The job is written: sbatch {path}")
    else:
        typer.echo(f"{said} ({path}; it prints to {folder}/slurm-JOB.log)")
