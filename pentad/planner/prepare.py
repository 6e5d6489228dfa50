"""Prepares the config of a command: reads the recipe, resolves Hub names, chooses defaults, checks,
downloads, and fits memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pentad.config.load import Reading, read_config
from pentad.config.resolve import resolve
from pentad.config.rules.check import check
from pentad.config.rules.rule import ON_EXAMPLES, Command, RunFacts
from pentad.config.schema import Config
from pentad.core.errors import Problem, UserError
from pentad.planner.hub import fetch, pin
from pentad.planner.plan import choose_device
from pentad.planner.remedies import BY_MEMORY, choose_layers
from pentad.rl.section import PreferenceConfig


def prepare(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    command: Command = "plan",
    gpu_memory: float | None = None,
    facts_here: Callable[[Config], RunFacts] | None = None,
    look: Callable[[Config, Collection[str]], list[Problem | str]] | None = None,
) -> tuple[Config, list[str]]:
    """The resolved and checked config of a command, with notes on what was chosen.

    `gpu_memory` (in GiB) plans for GPUs that need not exist here. `facts_here` gives facts of the
    start, and `look` reads the inputs of the run, given the config and the wrong keys. Both are
    used only if there are problems, to report all at once; a start without problems does these
    checks later. For a Slurm job, choices that depend on the device are made in the job.
    """
    samples = command not in ON_EXAMPLES
    reading = read_config(path, overrides, samples=samples)
    if not reading.is_read:
        raise UserError(reading.problems)
    with suppress(UserError):  # a rule reports it
        reading.config.register_models()
    reading = pin(_with_preference(reading, command), command)
    samples = samples and not (command == "plan" and reading.config.has_examples)
    config, notes = resolve(reading.config, samples=samples)
    notes, bad, known = [*reading.notes, *notes], reading.bad, reading.problems
    kind = choose_device(config, gpu_memory).kind if command == "plan" else None
    found = check(config, RunFacts(command=command, device=kind), bad)
    if (found or known) and facts_here is not None:
        found = check(config, facts_here(config), bad)
    if (found or known) and look is not None:
        found = [*found, *_further(look(config, bad), [*known, *found])]
    problems = [*known, *(_as_written(one, reading) for one in found)]
    if problems:
        raise UserError(dict.fromkeys(problems))
    is_run = command in ("train", *ON_EXAMPLES) and config.scheduler.type != "slurm"
    if is_run or command in ("eval", "reward"):  # a Slurm job downloads on its own machine
        fetch(config, command)
    if command == "plan" or is_run:
        device = choose_device(config, gpu_memory)
        for choose in BY_MEMORY:
            config, said = choose(config, device, command)
            notes += said
    if is_run:
        config, said = choose_layers(config, device)
        notes += said
    return config, notes


def _with_preference(reading: Reading, command: Command) -> Reading:
    """Adds the block `preference` for commands that read it; removes it for others, with a note."""
    given, notes = reading.config.preference, reading.notes
    if command in ("dpo", "reward-model"):
        given = given or PreferenceConfig()
        if command == "reward-model" and given.loss != "reward":
            if "loss" in given.model_fields_set:
                said = f"in place of {given.loss}: reward-model trains a reward model"
                notes = (*notes, f"preference.loss = reward {said}")
            given = given.model_copy(update={"loss": "reward"})
    elif command != "plan" and given is not None:
        given, notes = None, (*notes, f"preference: without effect, {command} does not read it")
    config = reading.config.model_copy(update={"preference": given})
    return replace(reading, config=config, notes=notes)


def _further(
    problems: Sequence[Problem | str], known: Sequence[Problem | str]
) -> list[Problem | str]:
    """The problems at keys for which none is known yet."""
    places = {one.where for one in known if isinstance(one, Problem)}
    return [one for one in problems if not (isinstance(one, Problem) and one.where in places)]


def _as_written(problem: Problem | str, reading: Reading) -> Problem | str:
    """The problem with the alias that the user wrote, if the key has its value from an alias."""
    if isinstance(problem, str):
        return problem
    return replace(problem, where=reading.written.get(problem.where, problem.where))
