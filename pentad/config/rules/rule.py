"""The form of a rule: a function that returns the problems it finds, and the commands it applies
to.

Rules read a resolved config and, if needed, facts of the run. A rule that reads a key which is
known to be wrong is skipped, as a second message about the same mistake would not help.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast

from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.core.section import Section
from pentad.core.sizes import DeviceKind

RunCommand = Literal["train", "sft", "pretrain", "dpo", "reward-model"]
Command = Literal[RunCommand, "plan", "eval", "reward"]
RUNS: tuple[Command, ...] = ("train", "sft", "plan")
"""Commands that train, or plan it; rules of `sft` apply to all of `ON_EXAMPLES`."""
ON_EXAMPLES: tuple[Command, ...] = ("sft", "pretrain", "dpo", "reward-model")
"""Commands that train on examples without sampling."""
FoundProblems = Problem | str | Iterable[Problem | str] | None
C = TypeVar("C", bound=Callable[..., object])


Stage = Literal["read", "start", "open"]
"""When the facts of a rule are known: when the recipe is read, when the device is known (also in a
plan), and when the samplers are open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts besides the config. The command is known when a recipe is read."""

    command: Command = "plan"
    device: DeviceKind | None = None
    num_gpus: int = 0
    """GPUs that torch finds on this machine; this and the next two are not known in a plan."""
    is_torchrun: bool = False
    """Whether torchrun started this process."""
    has_agents: bool = False
    """Whether processes can be started on the other machines of a Slurm job."""
    samplers: Mapping[str, Collection[str]] | None = None
    """Capabilities of each sampler."""

    @property
    def kind(self) -> DeviceKind:
        """The device type of the run."""
        assert self.device is not None, "only rules of the stage start read it"
        return self.device

    @property
    def stages(self) -> frozenset[Stage]:
        """The stages whose facts are known."""
        facts: dict[Stage, object] = {
            "read": self.command,
            "start": self.device,
            "open": self.samplers,
        }
        return frozenset(stage for stage, fact in facts.items() if fact is not None)

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
    """Function of the config, and of the facts if it has a second parameter."""
    commands: tuple[Command, ...]
    depends_on: tuple[str, ...]
    """The rule is skipped if one of these keys is wrong; empty: the keys that it reads."""
    is_noted: bool
    """Whether `plan` reports its problems as notes, while a run is rejected."""
    stage: Stage
    """The stage at which all facts that it reads are known."""
    has_subject: Callable[[Config], object]
    """True if the config has what the rules of the subject are about."""

    def is_asked(self, config: Config, facts: RunFacts) -> bool:
        """Whether the rule applies to the command, and its facts are known. A plan without a
        sampler counts as `sft`: rules for `train` only do not apply."""
        if self.stage not in facts.stages:
            return False
        command: Command = "sft" if facts.command in ON_EXAMPLES else facts.command
        wanted = {command, "sft"} if command == "plan" and not config.has_sampler else {command}
        return wanted <= set(self.commands)

    def problems(
        self, config: Config, facts: RunFacts, bad: frozenset[str] = frozenset()
    ) -> list[Problem | str]:
        """The problems it finds; none if it reads a bad key."""
        view, reads = recorded(config) if bad else (config, set())
        given = (view, facts)[: len(inspect.signature(self.check).parameters)]
        found = listed(self.check(*given)) if self.has_subject(view) else []
        if reads_any(self.depends_on or reads, bad):
            return []
        return [one for one in found if str(one).partition(" = ")[0] not in bad]


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of one subject, in the order written."""

    has_subject: Callable[[Config], object] = lambda config: True
    """True if the config has the subject; else no rule is applied."""
    all: list[ConfigRule] = field(default_factory=list)

    def add(
        self,
        *,
        commands: tuple[Command, ...] = ("train", "plan"),
        depends_on: tuple[str, ...] = (),
        is_noted: bool = False,
        stage: Stage = "read",
    ) -> Callable[[C], C]:
        """Decorates a check with the commands it applies to."""

        def register(check: C) -> C:
            given = (commands, depends_on, is_noted, stage, self.has_subject)
            self.all.append(ConfigRule(check, *given))  # type: ignore[arg-type]
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


def recorded(config: Config) -> tuple[Config, set[str]]:
    """A view of the config, and the dotted keys that have been read through it so far."""
    reads: set[str] = set()
    return cast(Config, _View(config, "", reads)), reads


def reads_any(reads: Collection[str], bad: Collection[str]) -> bool:
    """Whether any key that was read equals, contains, or is contained in a bad key."""
    return any(
        key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
        for key in reads
        for other in bad
    )


class _View:
    """A section that records which keys are read, also by its own properties."""

    __slots__ = ("_path", "_reads", "_section")

    def __init__(self, section: Section, path: str, reads: set[str]) -> None:
        self._section, self._path, self._reads = section, path, reads

    def __getattr__(self, name: str) -> Any:
        section = self._section
        if name not in type(section).model_fields:
            return _bound(getattr(type(section), name), self)
        value = getattr(section, name)
        if isinstance(value, Section):
            return _View(value, f"{self._path}{name}.", self._reads)
        self._reads.add(f"{self._path}{name}")
        return value

    @property
    def model_fields_set(self) -> set[str]:
        return self._section.model_fields_set

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in type(self._section).model_fields)

    def __eq__(self, other: object) -> bool:
        self._reads.add(self._path.removesuffix("."))
        return self._section == (other._section if isinstance(other, _View) else other)

    __hash__ = None  # type: ignore[assignment]

    def model_copy(self, *, update: Mapping[str, Any]) -> _View:
        plain = {
            name: value._section if isinstance(value, _View) else value
            for name, value in update.items()
        }
        return _View(self._section.model_copy(update=plain), self._path, self._reads)


def _bound(member: object, view: _View) -> Any:
    """A property or method of a section, bound to the view, so that its reads are recorded."""
    if isinstance(member, property) and member.fget is not None:
        return member.fget(view)
    return partial(cast(Callable[..., Any], member), view)
