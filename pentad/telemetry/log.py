"""Where log messages go: all of them to log.txt, warnings and notices to the screen as well.

What libraries have to say (Python warnings, transformers, torch and its compiler) goes to log.txt
alone, unless it is an error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
NOTICE = {"is_notice": True}
"""`extra` of a message that people should see although nothing is wrong."""
LIBRARIES = ("py", "transformers", "torch", "huggingface_hub", "datasets", "tokenizers", "vllm")
"""First parts of the names of loggers that are not ours (Python's warnings are `py.warnings`)."""


class ScreenHandler(logging.Handler):
    """Writes to sys.stderr as it is at that moment: a live table redirects it above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            head = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            sys.stderr.write(f"{head}{self.format(record)}\n")
        except Exception:  # a closed terminal must not end a run; logging reports it its own way
            self.handleError(record)


def is_shown(record: logging.LogRecord) -> bool:
    """Whether a message is for the screen."""
    if record.name.partition(".")[0] in LIBRARIES:
        return record.levelno >= logging.ERROR
    return record.levelno >= logging.WARNING or hasattr(record, "is_notice")


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Within the context the program's messages go to `path` (appended to) and to the screen."""
    root = logging.getLogger()
    screen = ScreenHandler(logging.INFO)
    screen.addFilter(is_shown)
    screen.setFormatter(logging.Formatter("%(message)s"))
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter(FILE_FORMAT))
    file.setLevel(logging.INFO)
    old_level, ours = root.level, logging.getLogger("pentad")
    old_ours = ours.level
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.INFO)
    for handler in (screen, file):
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        with libraries_hushed():
            yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(old_level)
        ours.setLevel(old_ours)
        for handler in (screen, file):
            root.removeHandler(handler)
            handler.close()


@contextmanager
def libraries_hushed() -> Iterator[None]:
    """Loggers of libraries that write to the screen by handlers of their own hand on to ours."""
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
