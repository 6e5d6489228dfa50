"""The errors people see: one sentence each, saying where, which rule, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


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

    def as_problems(self) -> list[Problem]:
        """Those that name a place, to be reported with others."""
        return [problem for problem in self.problems if isinstance(problem, Problem)]


def raise_problems(problems: Iterable[Problem | str]) -> None:
    """One UserError with all of them; returns where there are none."""
    if found := list(problems):
        raise UserError(found)


class RunError(Exception):
    """A run that cannot continue: the message is the first cause, in one sentence."""


class Transient(RunError):
    """A failure of the machinery (a process was lost, hung or crashed): started again from its last
    checkpoint, the run may continue."""


class Crashed(Transient):
    """An exception of the code, or of the operating system: it may pass, but not if it comes
    again."""


NOT_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "ENOTEMPTY"),
        *("EINVAL", "ENAMETOOLONG", "ELOOP", "EXDEV", "ENOSYS", "EOPNOTSUPP", "EADDRINUSE"),
        *("ENOEXEC", "EFBIG", "EOVERFLOW"),
    )
)
"""What the operating system answers for as long as nothing is set right."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""A disk without room: that may pass, and a user can see to it."""


def may_pass(error: OSError) -> bool:
    """Whether the same call may succeed a while later: storage or a network failed, or something
    was used up."""
    return error.errno not in NOT_PASSING


class WrongWeights(RunError):
    """A sampler holds other weights than those it was handed: nothing may be drawn from it."""


class Stopped(RunError):
    """The run was stopped by a signal; the text says what was saved."""


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


def visible(text: str, keep: str = "") -> str:
    """Characters that a terminal would obey, or not show, as their escapes; except `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def one_line(text: str, limit: int) -> str:
    """One visible line, the middle left out when it is too long."""
    half = (limit - 5) // 2
    if len(text) > 2 * limit:  # most of it will not be shown: do not escape all of it
        text = text[:limit] + text[-limit:]
    line = visible(text.strip())
    return line if len(line) <= limit else f"{line[:half]} ... {line[-half:]}"


class InfraFailure(Exception):
    """A replica, a connection or the reward pool failed; the prompt itself is not to blame."""


class FlawedAnswer(InfraFailure):
    """What a replica answered is no answer, though it lives: waiting for it would not help."""


class GivenUp(RunError):
    """A part of the machinery that was started again as often as it may be: the run ends."""


class DataFailure(Exception):
    """This prompt cannot become a group; the caller drops it and counts the reason."""

    def __init__(self, reason: str, detail: str, *, is_final: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        """A short word for counting, such as too_long or reward_timeout."""
        self.detail = detail
        self.is_final = is_final
        """Fresh samples would fail the same way, so none are drawn."""


def is_cancelled() -> bool:
    """Whether this task itself was cancelled, not only something that it awaits."""
    import asyncio  # here, as it would make `pentad --help` a quarter slower

    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the operating system that names no file names this one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not isinstance(error.filename, str):
            error.filename = str(path)  # it has none, or the number of an open file
        raise
