"""What the rules on models and layouts find, and those of a start."""

from pentad.config.rules import layout, model, start
from pentad.config.rules.rule import RunFacts
from pentad.core.errors import Problem


def check_layout(config, command="plan", bad=frozenset()) -> list[Problem]:
    facts = RunFacts(command=command)
    rules = (model.RULES, layout.RULES)
    return [problem for one in rules for problem in one.problems(config, facts, bad)]


def start_facts(kind, command="train", num_gpus=8) -> RunFacts:
    return RunFacts(command=command, device=kind, num_gpus=num_gpus)


def unbuilt(config, command="train") -> list[Problem]:
    """What can be planned and a start refuses."""
    return start.RULES.problems(config, RunFacts(command=command))
