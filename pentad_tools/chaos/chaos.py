"""`pentad chaos`: runs training with injected faults and prints a table of the results."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from pentad.cli.output import make_table, print_parts
from pentad.cli.recipe import Recipe
from pentad.config.rules.rule import RunCommand
from pentad.core.errors import Problem, UserError
from pentad_tools.chaos.scenarios import Scenario
from pentad_tools.chaos.suite import SCENARIOS, Result, Suite, fitting, soak
from pentad_tools.chaos.workloads import Workload, WorkloadKind, built_in, of_recipe

MIN_WIDTH = 180


def run_chaos(
    recipe: Recipe | None,
    names: list[str],
    *,
    command: RunCommand,
    seed: int,
    num_soak: int,
    keep: bool,
) -> int:
    """Runs the scenarios. Returns 0 if every invariant held in every scenario, else 1."""
    unknown = [name for name in names if name not in {one.name for one in SCENARIOS}]
    if unknown:
        rule, remedy = "there is no such scenario", "pentad chaos --list names them"
        raise UserError([Problem(f"--scenario {name}", rule, remedy) for name in unknown])
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # runs are bitwise repeatable on the CPU
    folder = Path(tempfile.mkdtemp(prefix="pentad-chaos-"))
    suite = Suite(workloads_of(recipe, command, folder), folder, seed)
    chosen = fitting(suite.workloads, names)
    if missing := [name for name in names if name not in {one.name for one in chosen}]:
        rule = "the recipe has no ranks or samplers for this fault"
        raise UserError([Problem(f"--scenario {name}", rule) for name in missing])
    with ended_by_sigterm():
        results = break_runs(suite, chosen, num_soak)
    failed = [one for one in results if one.broken]
    show_table(results)
    typer.echo(f"{len(results) - len(failed)} of {len(results)} hold, seed {seed}")
    for one in failed:
        typer.echo(f"{one.scenario.name}: {one.broken}")
    if failed or keep:
        typer.echo(f"files of the runs are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if failed else 0


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Handles SIGTERM like ctrl-C, so the current run is ended too."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def break_runs(suite: Suite, chosen: Sequence[Scenario], num_soak: int) -> list[Result]:
    if num_soak:
        typer.echo(f"{num_soak} faults, seed {suite.seed}, in {suite.folder}")
        return soak(suite, num_soak, show)
    typer.echo(f"{len(chosen)} scenarios, seed {suite.seed}, in {suite.folder}")
    results = []
    for scenario in chosen:
        results.append(suite.run(scenario))
        show(results[-1])
    return results


def workloads_of(
    recipe: Recipe | None, command: RunCommand, folder: Path
) -> dict[WorkloadKind, Workload]:
    if recipe is None:
        return built_in(folder)
    config, _ = recipe.prepare(command)
    words = () if recipe.path is None else (str(recipe.path),)
    return of_recipe((*words, *recipe.overrides), command, config)


def show(result: Result) -> None:
    """Prints a result immediately: a suite takes minutes."""
    verdict = "FAILED" if result.broken else result.scenario.outcome
    typer.echo(f"{result.scenario.name}: {result.done}: {verdict} ({result.seconds:.0f} s)")
    if result.broken:
        typer.echo(f"  {result.broken}")


def show_table(results: list[Result]) -> None:
    rows = []
    for one in results:
        outcome = "FAILED" if one.broken else one.scenario.outcome
        took = "" if one.recovery_s is None else f"{one.recovery_s:.1f}"
        rows.append((one.scenario.name, one.done, outcome, took, " ".join(one.held)))
    titles = ("scenario", "what was done", "outcome", "recovery s", "invariants")
    typer.echo("")
    table = make_table(titles, rows, right=("recovery s",), no_wrap=True)
    print_parts(table, min_width=MIN_WIDTH)


def list_scenarios() -> None:
    for one in SCENARIOS:
        needs = {"ranks": "several ranks", "rl": "samplers", "any": "any run"}[one.kind]
        equal = "losses the same" if one.is_near else "invariants only"
        equal = "ends bitwise the same" if one.is_equal else equal
        typer.echo(f"{one.name:25} {one.outcome:22} {needs:14} {equal}")
