"""Where log messages go: all of them to log.txt, warnings to the screen as well."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class ScreenHandler(logging.Handler):
    """Writes to sys.stderr as it is at that moment: a live table redirects it above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{record.levelname.lower()}: {self.format(record)}\n")
        except Exception:  # a closed terminal must not end a run; logging reports it its own way
            self.handleError(record)


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Within the context the program's messages go to `path` (appended to) and to the screen.

    Python warnings are messages too, in the file only, since libraries give many of no use.
    """
    root = logging.getLogger()
    screen = ScreenHandler(logging.WARNING)
    screen.addFilter(lambda record: record.name != "py.warnings")
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
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(old_level)
        ours.setLevel(old_ours)
        for handler in (screen, file):
            root.removeHandler(handler)
            handler.close()
