"""The form of a rule: a function that returns the problems it finds, and the commands it applies
to.

Rules read a resolved config and, if needed, facts of the run. A rule that reads a key which is
known to be wrong is left out: a second message about the same mistake does not help.
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
"""Commands that start a training run, or plan one; rules of `sft` apply to all of `ON_EXAMPLES`."""
ON_EXAMPLES: tuple[Command, ...] = ("sft", "pretrain", "dpo", "reward-model")
"""Commands that train on examples without sampling."""
FoundProblems = Problem | str | Iterable[Problem | str] | None
C = TypeVar("C", bound=Callable[..., object])


class UnknownFact(Exception):
    """A rule needs a fact that is not known at this stage; a later stage checks it."""


@dataclass(frozen=True, slots=True)
class StartFacts:
    """Facts that are known when processes are started."""

    num_gpus: int
    """GPUs that torch finds on this machine."""
    is_torchrun: bool = False
    """Whether torchrun started this process."""
    has_agents: bool = False
    """Whether processes can be started on the other machines of a Slurm job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts besides the config. They depend on the stage: while a recipe is read the command, in a
    plan also the device, at the start of a run all."""

    command: Command = "plan"
    device: DeviceKind | None = None
    start: StartFacts | None = None

    @property
    def kind(self) -> DeviceKind:
        """The device type of the run."""
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
        """Whether the run trains on samples, as far as the layout can be read."""
        if self.command in ON_EXAMPLES:
            return False
        return config.only == "train" or config.has_sampler

    def samples(self, config: Config) -> bool:
        return self.is_rl(config) and config.only != "train"


@dataclass(frozen=True, slots=True)
class ConfigRule:
    check: Callable[..., FoundProblems]
    """Its parameters are the config, and the facts if it has a second one."""
    commands: tuple[Command, ...]
    depends_on: tuple[str, ...]
    """The keys whose mistakes disable it; empty: those that it reads."""
    is_noted: bool
    """Whether a plan notes what a run rejects by it."""

    def is_asked(self, config: Config, facts: RunFacts) -> bool:
        """Whether it applies. A plan without a sampler is one of `sft`: rules of `train` only do
        not apply."""
        command: Command = "sft" if facts.command in ON_EXAMPLES else facts.command
        wanted = {command, "sft"} if command == "plan" and not config.has_sampler else {command}
        return wanted <= set(self.commands)

    def problems(
        self, config: Config, facts: RunFacts, bad: frozenset[str] = frozenset()
    ) -> list[Problem | str]:
        """Its problems, unless it reads one of the bad keys or needs an unknown fact."""
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
        """Decorates a check with the commands it applies to."""

        def register(check: C) -> C:
            rule = ConfigRule(check, commands, depends_on, is_noted)  # type: ignore[arg-type]
            self.all.append(rule)
            return check

        return register

    def problems(
        self, config: Config, facts: RunFacts, bad: frozenset[str] = frozenset()
    ) -> list[Problem | str]:
        """The problems that these rules find for the command."""
        asked = [rule for rule in self.all if rule.is_asked(config, facts)]
        return [problem for rule in asked for problem in rule.problems(config, facts, bad)]


def listed(found: FoundProblems) -> list[Problem | str]:
    return [found] if isinstance(found, Problem | str) else list(found or ())
