"""A run with scheduler.type=slurm: writes the job and hands it to sbatch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pentad.config.schema import Config


def submit_job(config: Config, command: str, notes: list[str], fresh: bool) -> None:
    """The config is written beside the script, so that what runs is what was asked for now."""
    from pentad.config.derived import component_of
    from pentad.config.load import dump_config
    from pentad.config.resolve import replaced
    from pentad.config.rules.start import unbuilt_problems
    from pentad.core.errors import UserError
    from pentad.runtime.slurm import SlurmJob, submit, write_script

    if problems := unbuilt_problems(config, samples=command == "train"):
        raise UserError(problems)
    trial = "-".join((config.user or "user", config.experiment_name, config.trial_name))
    folder = Path(config.fileroot).absolute() / "slurm" / re.sub(r"[^\w.-]", "-", trial)
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "config.yaml"
    recipe.write_text(dump_config(replaced(config, ["scheduler", "type"], "local")))
    job = SlurmJob(
        name=f"{config.experiment_name}-{config.trial_name}",
        folder=folder,
        num_nodes=config.cluster.n_nodes,
        ranks_per_node=component_of(config, "actor").world // config.cluster.n_nodes,
        gpus_per_node=config.cluster.n_gpus_per_node,
        command=(command, str(recipe)),
        first_only=("--fresh",) if fresh else (),
        work_folder=Path.cwd(),
    )
    path = write_script(job)
    if job.gpus_per_node is None:
        notes = [*notes, "cluster.n_gpus_per_node is unset: the job asks for no GPUs"]
    for note in notes:
        typer.echo(f"note: {note}")
    said = submit(path)
    if said is None:
        typer.echo(f"There is no sbatch on the path. The job is written: sbatch {path}")
    else:
        typer.echo(f"{said} ({path}; it prints to {folder}/slurm-JOB.log)")
