"""Routes log messages: all to log.txt, warnings and notices also to the screen.

Messages of libraries (Python warnings, transformers, torch and its compiler) go to log.txt only,
unless they are errors. Repeated warnings are shown once, with a count.
"""

from __future__ import annotations

import logging
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pentad.core.errors import visible

FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
NOTICE = {"is_notice": True}
"""`extra` of a message below warning that is shown on the screen."""
LONG_S = 5.0
"""Seconds after which the end of announced work is also shown."""
LIBRARIES = ("py", "transformers", "torch", "huggingface_hub", "datasets", "tokenizers", "vllm")
"""First parts of the names of other libraries' loggers (Python's warnings are `py.warnings`)."""


BEGINNING = 80
"""Characters of a repeated warning in the summary at the end."""
REPEAT_S = 60.0
"""Within this time, a warning that differs from an earlier one only in numbers is counted, not
shown."""


@dataclass(slots=True)
class Shown:
    """A warning on the screen."""

    at: float
    text: str
    num_hidden: int = 0
    """Number of similar warnings since."""


class VisibleFormatter(logging.Formatter):
    """Escapes control characters, because messages may quote external text."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), keep="\n\t")


class ScreenHandler(logging.Handler):
    """Writes to the current sys.stderr, which a live table redirects above itself. Only the first
    of similar warnings is shown; the number of others is in the next one, or in a line at the
    end."""

    def __init__(self, level: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(level)
        self.clock = clock
        self.warnings: dict[tuple[str, str], Shown] = {}

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.levelno == logging.WARNING:
                text = self._unless_repeated(record.name, text)
            head = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            if text:
                sys.stderr.write(f"{head}{text}\n")
        except Exception:  # a closed terminal must not end a run
            self.handleError(record)

    def close(self) -> None:
        for shown in self.warnings.values():
            if shown.num_hidden and sys.stderr is not None:
                begins = textwrap.shorten(shown.text, BEGINNING, placeholder=" ...")
                sys.stderr.write(f"warning: {shown.num_hidden} more like: {begins}\n")
        self.warnings = {}
        super().close()

    def _unless_repeated(self, name: str, text: str) -> str:
        """The text to show; None if a similar one was shown shortly before."""
        kind, now = (name, re.sub(r"[0-9]+", "#", text)), self.clock()
        before = self.warnings.get(kind)
        if before is not None and now - before.at < REPEAT_S:
            before.num_hidden += 1
            return ""
        self.warnings[kind] = Shown(now, text)
        num_hidden = before.num_hidden if before else 0
        return f"{text} ({num_hidden} like it before)" if num_hidden else text


class LogFile(logging.FileHandler):
    """Log file that reports a write failure (full disk) with one line on the screen, so that the
    run's own failure stays the last line."""

    is_reported = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_reported and sys.stderr is not None:
            self.is_reported = True
            sys.stderr.write(f"warning: {self.baseFilename} cannot be written: {error}\n")

    def close(self) -> None:
        with suppress(OSError):  # flushing the buffer may fail
            super().close()


@contextmanager
def announced(log: logging.Logger, what: str) -> Iterator[None]:
    """Context that shows on the screen the start of long work, and its duration."""
    log.info("%s ...", what, extra=NOTICE)
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    log.info("%s: done in %.1f s", what, took, extra=NOTICE if took >= LONG_S else None)


def belongs_on_screen(record: logging.LogRecord) -> bool:
    """Whether a message is shown on the screen."""
    if record.name.partition(".")[0] in LIBRARIES:
        return record.levelno >= logging.ERROR
    return record.levelno >= logging.WARNING or hasattr(record, "is_notice")


@contextmanager
def log_to(path: Path, *, is_shown: bool = True) -> Iterator[None]:
    """Context in which log messages are appended to `path`, and shown on the screen if
    `is_shown`."""
    root = logging.getLogger()
    screen = ScreenHandler(logging.INFO)
    screen.addFilter(belongs_on_screen)
    screen.setFormatter(VisibleFormatter("%(message)s"))
    file = LogFile(path, encoding="utf-8")
    file.setFormatter(VisibleFormatter(FILE_FORMAT))
    file.setLevel(logging.INFO)
    old_level, ours = root.level, logging.getLogger("pentad")
    old_ours = ours.level
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.INFO)
    handlers = (screen, file) if is_shown else (file,)
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        with libraries_hushed():
            yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(old_level)
        ours.setLevel(old_ours)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


@contextmanager
def libraries_hushed() -> Iterator[None]:
    """Context that redirects libraries' loggers from their own screen handlers to ours."""
    taken: list[tuple[logging.Logger, bool, logging.Handler]] = []
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or name.partition(".")[0] not in LIBRARIES:
            continue
        for own in [one for one in logger.handlers if type(one) is logging.StreamHandler]:
            taken.append((logger, logger.propagate, own))
            logger.propagate = True
            logger.removeHandler(own)
    try:
        yield
    finally:
        for logger, propagate, handler in reversed(taken):
            logger.propagate = propagate
            logger.addHandler(handler)
