"""Error classes for users: each message has the place, the violated rule, and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of the user's input. Example: Problem("actor.path = models/qwen", "no such
    folder", "give a folder with config.json") is shown as "actor.path = models/qwen: no such
    folder; give a folder with config.json".
    """

    where: str
    """Key and value, such as `allocation_mode = archon:d2p3`."""
    rule: str
    """The broken rule, with the other value on which it depends."""
    remedy: str = ""
    """A fix that works; empty if none is known."""

    def __str__(self) -> str:
        text = f"{self.where}: {self.rule}"
        text = f"{text}; {self.remedy}" if self.remedy else text
        return text if text.endswith("?") else text.rstrip(".") + "."


class UserError(Exception):
    """Invalid input, with all problems found, without repetition; the command line prints them
    without a traceback."""

    def __init__(self, problems: str | Problem | Iterable[Problem | str]) -> None:
        if isinstance(problems, str | Problem):
            problems = [problems]
        by_sentence: dict[str, Problem | str] = {}
        for problem in problems:
            by_sentence.setdefault(str(problem), problem)
        self.problems = list(by_sentence.values())
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def as_problems(self) -> list[Problem]:
        """The problems that are `Problem` objects, to be reported with others."""
        return [problem for problem in self.problems if isinstance(problem, Problem)]


def raise_problems(problems: Iterable[Problem | str]) -> None:
    """Raises one UserError with all problems; returns if there are none."""
    if found := list(problems):
        raise UserError(found)


class RunError(Exception):
    """Raised if a run cannot continue; the message is the first cause, in one sentence."""


class Transient(RunError):
    """An infrastructure failure (a process was lost, hung or crashed): the run may continue after a
    restart from its last checkpoint."""


class Crashed(Transient):
    """An exception in the code, or from the operating system: treated as transient until it
    repeats."""


NOT_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "ENOTEMPTY"),
        *("EINVAL", "ENAMETOOLONG", "ELOOP", "EXDEV", "ENOSYS", "EOPNOTSUPP", "EADDRINUSE"),
        *("ENOEXEC", "EFBIG", "EOVERFLOW"),
    )
)
"""Errors of the operating system that persist until their cause is removed."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a full disk: transient, because the user can free space."""


def may_pass(error: OSError) -> bool:
    """Whether the same call may succeed later: storage or a network failed, or a resource was
    exhausted."""
    return error.errno not in NOT_PASSING


class WrongWeights(RunError):
    """A sampler does not have the weights that were sent to it: it must not sample."""


class Stopped(RunError):
    """The run was stopped by a signal; the message reports the saved state."""


class Interrupted(Stopped):
    """The run was ended by ctrl-C; the message reports the saved state."""


def first_cause(failure: BaseException) -> BaseException:
    """The original failure: in an exception group, as TaskGroup raises, the first of Pentad's
    errors, else the first exception."""
    if not isinstance(failure, BaseExceptionGroup):
        return failure
    causes = [first_cause(one) for one in failure.exceptions]
    own = [cause for cause in causes if isinstance(cause, RunError | UserError)]
    return (own or causes)[0]


def visible(text: str, keep: str = "") -> str:
    """Escapes characters that a terminal would interpret or not display, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def one_line(text: str, limit: int) -> str:
    """The text as one escaped line, shortened in the middle if it is too long."""
    half = (limit - 5) // 2
    if len(text) > 2 * limit:  # do not escape text that is not shown
        text = text[:limit] + text[-limit:]
    line = visible(text.strip())
    return line if len(line) <= limit else f"{line[:half]} ... {line[-half:]}"


class InfraFailure(Exception):
    """A replica, a connection or the reward pool failed; the prompt is not the cause."""


class FlawedAnswer(InfraFailure):
    """A running replica returned an invalid answer: waiting would not help."""


class GivenUp(RunError):
    """A component reached its restart limit: the run ends."""


class DataFailure(Exception):
    """This prompt cannot become a group; the caller drops it and counts the reason."""

    def __init__(self, reason: str, detail: str, *, is_final: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        """A short name for counting, such as too_long or reward_timeout."""
        self.detail = detail
        self.is_final = is_final
        """Whether new samples would fail the same way, so that there is no retry."""


def is_cancelled() -> bool:
    """Whether this task was cancelled, not only one that it awaits."""
    import asyncio  # here, as it makes `pentad --help` a quarter slower

    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds this path to an OSError that names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not isinstance(error.filename, str):
            error.filename = str(path)  # None, or a file descriptor
        raise
