"""What a rule is: a function that returns the problems it finds, and when it is asked.

Rules look at a resolved config and, where they need it, at facts of the run. A rule that reads a
key which is known to be wrong is left out: a second complaint about the same mistake is no help.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pentad.config.rules.recorded import reads_any, recorded
from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.core.sizes import DeviceKind

RunCommand = Literal["train", "sft", "pretrain", "dpo", "reward-model"]
Command = Literal[RunCommand, "plan", "eval", "reward"]
RUNS: tuple[Command, ...] = ("train", "sft", "plan")
"""What starts a run that trains, or plans one; what `sft` is checked for, all of `ON_EXAMPLES`
are."""
ON_EXAMPLES: tuple[Command, ...] = ("sft", "pretrain", "dpo", "reward-model")
"""Commands of runs that train on examples and sample nothing."""
FoundProblems = Problem | str | Iterable[Problem | str] | None
C = TypeVar("C", bound=Callable[..., object])


class UnknownFact(Exception):
    """A rule asked for what is not known at this stage; a later one asks it again."""


@dataclass(frozen=True, slots=True)
class StartFacts:
    """What is known where processes are started."""

    num_gpus: int
    """GPUs of this machine that torch finds."""
    is_torchrun: bool = False
    """Whether torchrun started this process."""
    has_agents: bool = False
    """Whether processes can be started on the other machines of a Slurm job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What rules ask beside the config. A stage is what is known of it: while a recipe is read the
    command, of a plan also the device it is for, at the start of a run all of it."""

    command: Command = "plan"
    device: DeviceKind | None = None
    start: StartFacts | None = None

    @property
    def kind(self) -> DeviceKind:
        """What the run computes on."""
        if self.device is None:
            raise UnknownFact
        return self.device

    @property
    def at_start(self) -> StartFacts:
        if self.start is None:
            raise UnknownFact
        return self.start

    @property
    def is_plan(self) -> bool:
        return self.command == "plan"

    def is_rl(self, config: Config) -> bool:
        """Whether the run trains what was sampled, as far as the layout can be read."""
        if self.command in ON_EXAMPLES:
            return False
        return config.only == "train" or config.has_sampler

    def samples(self, config: Config) -> bool:
        return self.is_rl(config) and config.only != "train"


@dataclass(frozen=True, slots=True)
class ConfigRule:
    check: Callable[..., FoundProblems]
    """Takes the config, and the facts if it has a second parameter."""
    commands: tuple[Command, ...]
    depends_on: tuple[str, ...]
    """The keys whose mistakes silence it; empty: those that it reads."""
    is_noted: bool
    """Whether a plan notes what a run refuses by it."""

    def is_asked(self, config: Config, facts: RunFacts) -> bool:
        """A plan without a sampler is one of `sft`: rules that only `train` has do not matter."""
        command: Command = "sft" if facts.command in ON_EXAMPLES else facts.command
        wanted = {command, "sft"} if command == "plan" and not config.has_sampler else {command}
        return wanted <= set(self.commands)

    def problems(
        self, config: Config, facts: RunFacts, bad: frozenset[str] = frozenset()
    ) -> list[Problem | str]:
        """What it finds, unless it reads one of the bad keys or asks for an unknown fact."""
        view, reads = recorded(config) if bad else (config, set())
        given = (view, facts)[: len(inspect.signature(self.check).parameters)]
        try:
            found = listed(self.check(*given))
        except UnknownFact:
            return []
        if reads_any(self.depends_on or reads, bad):
            return []
        return [one for one in found if str(one).partition(" = ")[0] not in bad]


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of one subject, in the order written."""

    all: list[ConfigRule] = field(default_factory=list)

    def add(
        self,
        *,
        commands: tuple[Command, ...] = ("train", "plan"),
        depends_on: tuple[str, ...] = (),
        is_noted: bool = False,
    ) -> Callable[[C], C]:
        """Decorates a check with the commands it matters to."""

        def register(check: C) -> C:
            rule = ConfigRule(check, commands, depends_on, is_noted)  # type: ignore[arg-type]
            self.all.append(rule)
            return check

        return register

    def problems(
        self, config: Config, facts: RunFacts, bad: frozenset[str] = frozenset()
    ) -> list[Problem | str]:
        """What those rules find that matter to the command."""
        asked = [rule for rule in self.all if rule.is_asked(config, facts)]
        return [problem for rule in asked for problem in rule.problems(config, facts, bad)]


def listed(found: FoundProblems) -> list[Problem | str]:
    return [found] if isinstance(found, Problem | str) else list(found or ())
