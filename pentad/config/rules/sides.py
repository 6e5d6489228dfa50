"""Rules on runs of one side alone: `only: rollout` and `only: train`."""

from __future__ import annotations

from pathlib import Path

from pentad.config.rules.rule import Rules
from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.telemetry.runfolder import run_path

RULES: Rules[[Config]] = Rules()


@RULES.add("only", "groups_from")
def groups_are_for_a_run_that_only_trains(config: Config) -> Problem | None:
    if config.only == "train" and config.groups_from is None:
        remedy = "give the folder of its records: {fileroot}/logs/USER/EXPERIMENT/TRIAL"
        return Problem("groups_from", "only = train trains the groups of another run", remedy)
    if config.only != "train" and config.groups_from is not None:
        where = f"groups_from = {config.groups_from}"
        return Problem(where, "is read by only = train alone", "set only: train, or leave it out")
    return None


@RULES.add("only", "groups_from", commands=("train",))
def groups_are_there(config: Config) -> Problem | None:
    if config.only != "train" or config.groups_from is None:
        return None
    if any(Path(config.groups_from, "batches").glob("step*.groups")):
        return None
    rule = "has no groups: no step*.groups in its batches/"
    remedy = "give the folder of a run's records; telemetry.keep_batches says what it keeps"
    return Problem(f"groups_from = {config.groups_from}", rule, remedy)


@RULES.add("only", "groups_from", "fileroot", "experiment_name", "trial_name", "user")
def groups_are_of_another_run(config: Config) -> Problem | None:
    """A run begins by removing batches of its folder that it has not trained."""
    if config.only != "train" or config.groups_from is None:
        return None
    own = run_path(config.fileroot, config.experiment_name, config.trial_name, config.user)
    if Path(config.groups_from).resolve() != own.resolve():
        return None
    rule = "is this run's own folder, whose batches/ it writes itself"
    return Problem(f"groups_from = {config.groups_from}", rule, "give it another trial_name")


@RULES.add("only", "scheduler.type")
def one_side_is_no_job(config: Config) -> Problem | None:
    if config.only is None or config.scheduler.type != "slurm":
        return None
    rule = "the job runs both sides, and samples for the weights it trains"
    return Problem(f"only = {config.only}", rule, "leave it out, or use scheduler.type: local")
