"""JSON-lines files of a run (steps, samples, evaluations): appended whole lines, read back safely.

A line is on disk for any reader as soon as `append` returns. A crash can tear the last line only:
readers pass over it, and opening the file to append cuts it off, so it never merges with the next.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentad.core.errors import Problem, UserError


class LineWriter:
    """Appends JSON objects to one file. A write that fails (disk full) leaves no half line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self.size = _whole_bytes(path)
        os.ftruncate(self.file, self.size)

    def append(self, value: Mapping[str, Any]) -> None:
        line = (json.dumps(value, allow_nan=False) + "\n").encode()
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(self.file, line[written:], self.size + written)
        except OSError:
            os.ftruncate(self.file, self.size)
            raise
        self.size += len(line)

    def close(self) -> None:
        os.close(self.file)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line; none if there is no file. A broken line before the last is an error."""
    if not path.exists():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(whole, 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise UserError(Problem(f"{path}:{number}", "not JSON", "was it edited?")) from error
        found.append(value)
    return found


def _whole_bytes(path: Path) -> int:
    """The length up to and including the last line break."""
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - (1 << 16))
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0
