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
    folder", "give a folder with config.json") reads "actor.path = models/qwen: no such folder; give
    a folder with config.json".
    """

    where: str
    """Path and value, `allocation_mode = archon:d2p3`."""
    rule: str
    """The rule that is broken, with the other value it depends on."""
    remedy: str = ""
    """A fix that works."""

    def __str__(self) -> str:
        text = f"{self.where}: {self.rule}"
        text = f"{text}; {self.remedy}" if self.remedy else text
        return text if text.endswith("?") else text.rstrip(".") + "."


class UserError(Exception):
    """Bad input. Carries every problem found, each message once; the command line prints them
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
        """The problems with a place, to be reported with others."""
        return [problem for problem in self.problems if isinstance(problem, Problem)]


def raise_problems(problems: Iterable[Problem | str]) -> None:
    """Raises one UserError with all problems; returns if there are none."""
    if found := list(problems):
        raise UserError(found)


class RunError(Exception):
    """A run that cannot continue: the message is the first cause, in one sentence."""


class Transient(RunError):
    """An infrastructure failure (a process was lost, hung or crashed): restarted from its last
    checkpoint, the run may continue."""


class Crashed(Transient):
    """An exception of the code, or of the operating system: it may be transient, but not if it
    occurs again."""


NOT_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EACCES", "EPERM", "EROFS", "ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "ENOTEMPTY"),
        *("EINVAL", "ENAMETOOLONG", "ELOOP", "EXDEV", "ENOSYS", "EOPNOTSUPP", "EADDRINUSE"),
        *("ENOEXEC", "EFBIG", "EOVERFLOW"),
    )
)
"""Errors of the operating system that persist until a cause is removed."""


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a full disk: transient, because the user can free space."""


def may_pass(error: OSError) -> bool:
    """Whether the same call may succeed later: storage or a network failed, or a resource was
    exhausted."""
    return error.errno not in NOT_PASSING


class WrongWeights(RunError):
    """A sampler has other weights than the ones sent to it: it must not sample."""


class Stopped(RunError):
    """The run was stopped by a signal; the text says what was saved."""


class Interrupted(Stopped):
    """A run that its user ended by ctrl-C, with the state that was saved."""


def first_cause(failure: BaseException) -> BaseException:
    """The failure that began it. In a group of exceptions, as TaskGroup raises, that is the first
    of Pentad's own errors, else the first exception."""
    if not isinstance(failure, BaseExceptionGroup):
        return failure
    causes = [first_cause(one) for one in failure.exceptions]
    own = [cause for cause in causes if isinstance(cause, RunError | UserError)]
    return (own or causes)[0]


def visible(text: str, keep: str = "") -> str:
    """Escapes characters that a terminal would interpret, or not show; except `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def one_line(text: str, limit: int) -> str:
    """One visible line, shortened in the middle if it is too long."""
    half = (limit - 5) // 2
    if len(text) > 2 * limit:  # most of it will not be shown: do not escape all of it
        text = text[:limit] + text[-limit:]
    line = visible(text.strip())
    return line if len(line) <= limit else f"{line[:half]} ... {line[-half:]}"


class InfraFailure(Exception):
    """A replica, a connection or the reward pool failed; the prompt is not the cause."""


class FlawedAnswer(InfraFailure):
    """A replica that runs gave an invalid answer: waiting would not help."""


class GivenUp(RunError):
    """A component reached its limit of restarts: the run ends."""


class DataFailure(Exception):
    """This prompt cannot become a group; the caller drops it and counts the reason."""

    def __init__(self, reason: str, detail: str, *, is_final: bool = False) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        """A short name for counting, such as too_long or reward_timeout."""
        self.detail = detail
        self.is_final = is_final
        """New samples would fail the same way, so none are drawn."""


def is_cancelled() -> bool:
    """Whether this task itself was cancelled, not only an awaited one."""
    import asyncio  # here, as it would make `pentad --help` a quarter slower

    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds this file to an error of the operating system that names none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not isinstance(error.filename, str):
            error.filename = str(path)  # it has none, or the number of an open file
        raise
