"""The list of all rules, and the problems that apply to a command."""

from __future__ import annotations

from pentad.config.rules import (
    algorithm,
    checkpoint,
    elastic,
    environments,
    inputs,
    layout,
    lora,
    megatron,
    model,
    modes,
    start,
)
from pentad.config.rules.rule import ConfigRule, RunFacts, Stage
from pentad.config.schema import Config
from pentad.core.errors import Problem

SUBJECTS = (
    *(inputs, environments, modes, algorithm, checkpoint),
    *(elastic, model, lora, layout, megatron, start),
)


def all_rules() -> list[ConfigRule]:
    return [rule for subject in SUBJECTS for rule in subject.RULES.all]


def check(
    config: Config,
    facts: RunFacts | None = None,
    bad: frozenset[str] = frozenset(),
    *,
    stage: Stage | None = None,
) -> list[Problem | str]:
    """The problems of all rules, except rules that read a bad key or need unknown facts. `stage`:
    only of rules whose last fact became known there; others have been applied before."""
    facts = facts or RunFacts()
    rules = [rule for rule in all_rules() if stage in (None, rule.stage)]
    asked = [rule for rule in rules if rule.is_asked(config, facts)]
    return [problem for rule in asked for problem in rule.problems(config, facts, bad)]


def noted(config: Config) -> list[Problem | str]:
    """Problems that `plan` reports as notes, while a run is rejected."""
    rules = [rule for rule in all_rules() if rule.is_noted]
    return [problem for rule in rules for problem in rule.problems(config, RunFacts())]
