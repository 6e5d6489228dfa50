"""Asks every rule that matters to a command, and returns all problems together."""

from __future__ import annotations

from pathlib import Path

from pentad.config.derived import count_devices, dims_of, known_dims, problems_of, samples
from pentad.config.rules import algorithm, checkpoint, elastic, inputs, layout, model, modes
from pentad.config.rules.rule import Command, ConfigRule, listed
from pentad.config.rules.start import cache_problems, device_problems, process_problems
from pentad.config.schema import Config
from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.sizes import DeviceKind

SUBJECTS = (inputs, modes, layout, algorithm, checkpoint, elastic)


def all_rules() -> list[ConfigRule[[Config]]]:
    return [rule for subject in SUBJECTS for rule in subject.RULES.all]


def check(
    config: Config, command: Command = "plan", skip: frozenset[str] = frozenset()
) -> list[Problem]:
    """Every broken rule, except those that read a key in `skip`.

    A plan without a sampler is one of `sft`, and rules that only `train` has do not matter to it.
    What matters to `sft` does to `pretrain`.
    """
    command = "sft" if command == "pretrain" else command
    commands = {command, "sft"} if command == "plan" and not samples(config) else {command}
    problems = [
        problem
        for rule in all_rules()
        if commands <= set(rule.commands) and not rule.is_skipped(skip)
        for problem in listed(rule.check(config))
        if problem.where.split(" = ")[0] not in skip
    ]
    if command in ("eval", "reward"):  # in one process, whatever the layout of the run
        return problems
    return problems + check_layout(config, command, skip)


def check_layout(
    config: Config, command: str = "plan", skip: frozenset[str] = frozenset()
) -> list[Problem]:
    """The layout rules for a command, the model and the machine looked up; `skip`: bad keys."""
    problems = model.unknown_families(config, command, skip)
    dims: ModelDims | None = None
    is_sampled = command != "sft" and samples(config)
    if config.actor.path is not None and "actor.path" not in skip and not problems:
        try:
            dims = dims_of(config.actor.path)
            if is_sampled and (Path(config.actor.path) / "config.json").is_file():
                problems += model.RULES.problems(config, dims)
        except UserError as error:
            # A run complains about a missing folder by itself.
            if command == "plan" and model.uncounted(config) is None:
                problems += problems_of(error)
    if command == "plan":
        problems += model.unknown_models(config, skip)
    if is_sampled and dims is not None and not skip & {"ref.path", "teacher.path"}:
        problems += model.tags_are_alike(config, dims)
    if "allocation_mode" in skip:
        return problems
    if command == "train" and config.only != "train" and not samples(config):
        where = f"allocation_mode = {config.allocation_mode}"
        remedy = f"use for instance embedded:d1|{config.allocation_mode}"
        problems.append(Problem(where, "there is no sampler, and train needs one", remedy))
    idle = layout.idle_devices(config) if command != "plan" else ()
    return [*problems, *layout.layout_problems(config, dims, count_devices(config)), *idle]


def check_planned(config: Config, kind: DeviceKind, skip: frozenset[str]) -> list[Problem]:
    """What a start on such a device would refuse; where it is a GPU, its number is the cluster's.

    What is not built is no problem of a plan: it is noted there (`rules.start.unbuilt_problems`).
    """
    problems = [
        *device_problems(config, kind, samples=samples(config)),
        *process_problems(config, kind),
    ]
    dims = None if "actor.path" in skip else known_dims(config.actor.path)
    return problems if dims is None else problems + cache_problems(config, dims, kind)
