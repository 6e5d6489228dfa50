"""The errors people see: one sentence each, saying where, which rule, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with what the user gave us.

    Example: Problem("actor.path = models/qwen", "no such folder", "give a folder with config.json")
    reads "actor.path = models/qwen: no such folder; give a folder with config.json."
    """

    where: str
    """Path and value, `allocation_mode = archon:d2p3`."""
    rule: str
    """The rule that is broken, with the other value it depends on."""
    remedy: str = ""
    """What would work."""

    def __str__(self) -> str:
        text = f"{self.where}: {self.rule}"
        text = f"{text}; {self.remedy}" if self.remedy else text
        return text if text.endswith("?") else text.rstrip(".") + "."


class UserError(Exception):
    """Bad input. Carries every problem found; the command line prints them without a traceback."""

    def __init__(self, problems: str | Problem | Iterable[Problem | str]) -> None:
        if isinstance(problems, str | Problem):
            problems = [problems]
        self.problems: list[Problem | str] = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RunError(Exception):
    """A run that cannot go on: the message is the first cause, in one sentence."""


class Transient(RunError):
    """A failure of the machinery (a process was lost, hung or crashed): started again from its last
    checkpoint, the run may go on."""


class Crashed(Transient):
    """An exception of the code on a rank: it may pass, but not if it comes again."""


class WrongWeights(RunError):
    """A sampler holds other weights than those it was handed: nothing may be drawn from it."""


class Stopped(RunError):
    """A run that a signal asked to stop, with what became of it."""


class Interrupted(Stopped):
    """A run that its user ended by ctrl-C, with what became of it."""


def first_cause(failure: BaseException) -> BaseException:
    """The failure that began it. Of groups, as TaskGroup raises, that is the first of our own
    sentences, else whatever was raised first."""
    if not isinstance(failure, BaseExceptionGroup):
        return failure
    causes = [first_cause(one) for one in failure.exceptions]
    own = [cause for cause in causes if isinstance(cause, RunError | UserError)]
    return (own or causes)[0]
