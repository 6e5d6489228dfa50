"""What a rule is: a function that returns the problems it finds, and when it is asked.

Rules look at a resolved config, or at what was read off it. Each names the keys it reads, so that
it is left out when one of them is already known to be wrong: a second complaint about the same
mistake helps nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, ParamSpec, TypeVar

from pentad.core.errors import Problem

RunCommand = Literal["train", "sft", "pretrain"]
Command = Literal[RunCommand, "plan", "eval", "reward"]
RUNS: tuple[Command, ...] = ("train", "sft", "plan")
"""What starts a run that trains, or plans one; what matters to `sft` does to `pretrain`."""
P = ParamSpec("P")
FoundProblems = Problem | Iterable[Problem] | None
F = TypeVar("F", bound=Problem | Iterable[Problem] | None)


@dataclass(frozen=True, slots=True)
class ConfigRule(Generic[P]):
    check: Callable[P, FoundProblems]
    keys: tuple[str, ...]
    """Dotted keys it reads; a block stands for everything in it."""
    commands: tuple[Command, ...]
    is_by_key: bool = False
    """Whether each problem is about the one key it names, so that another key of a block that the
    rule reads may be wrong."""

    def is_skipped(self, bad: frozenset[str]) -> bool:
        """Whether a key that it reads, a block that key is in, or a key in it is a bad one."""
        for key in self.keys:
            if any(key == other or key.startswith(f"{other}.") for other in bad):
                return True
            if not self.is_by_key and any(other.startswith(f"{key}.") for other in bad):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Rules(Generic[P]):
    """Rules that look at the same things, in the order written."""

    all: list[ConfigRule[P]] = field(default_factory=list)

    def add(
        self,
        *keys: str,
        commands: tuple[Command, ...] = ("train", "plan"),
        is_by_key: bool = False,
    ) -> Callable[[Callable[P, F]], Callable[P, F]]:
        """Decorates a check with the keys it reads and the commands it matters to."""

        def register(check: Callable[P, F]) -> Callable[P, F]:
            self.all.append(ConfigRule(check, keys, commands, is_by_key))
            return check

        return register

    def problems(self, *args: P.args, **kwargs: P.kwargs) -> list[Problem]:
        """What every rule finds, whatever the command."""
        return [problem for rule in self.all for problem in listed(rule.check(*args, **kwargs))]


def listed(found: FoundProblems) -> list[Problem]:
    return [found] if isinstance(found, Problem) else list(found or ())
