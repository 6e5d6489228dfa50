"""What a rule between keys is: a small function that returns the problems it finds.

Rules look at a resolved config. Each names the keys it reads, so that it is left out when one of
them is already known to be wrong: a second complaint about the same mistake helps nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pentad.config.schema import Config
from pentad.core.errors import Problem

Command = Literal["train", "sft", "plan", "eval", "reward"]
Check = Callable[[Config], Problem | list[Problem] | None]


@dataclass(frozen=True, slots=True)
class Rule:
    check: Check
    keys: tuple[str, ...]
    """Dotted keys it reads; a block stands for everything in it."""
    commands: tuple[Command, ...]
    is_by_key: bool = False
    """Whether each problem is about the one key it names, so that another key of a block that the
    rule reads may be wrong."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one module, in the order written."""

    all: list[Rule] = field(default_factory=list)

    def add(
        self,
        *keys: str,
        commands: tuple[Command, ...] = ("train", "plan"),
        is_by_key: bool = False,
    ) -> Callable[[Check], Check]:
        """Decorates a check with the keys it reads and the commands it matters to."""

        def register(check: Check) -> Check:
            self.all.append(Rule(check, keys, commands, is_by_key))
            return check

        return register
