"""JSON-lines files of a run (steps, samples, evaluations): whole lines are appended and read back
safely.

A line is visible to any reader as soon as `append` returns. A crash can leave only the last line
incomplete: readers skip it, and opening the file for appending removes it, so it never merges with
the next. Lines of steps that a resumed run repeated stay, marked `superseded`, and readers skip
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.core.files import write_atomic


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

    def sync(self) -> None:
        """Flushes the file to disk."""
        os.fsync(self.file)

    def close(self) -> None:
        os.close(self.file)


def read_lines(path: Path, *, superseded: bool = False) -> list[dict[str, Any]]:
    """Every complete line that is not superseded (or all); none without a file. A broken line
    before the last is an error."""
    return [line for line in _lines(path) if superseded or not line.get("superseded")]


def supersede(path: Path, *, after: int, key: str = "step") -> set[int]:
    """Marks the lines beyond step (or version) `after`, which a resumed run repeats; returns them.
    For a file that no writer has open."""
    redone = {line[key] for line in read_lines(path) if line[key] > after}
    if not redone:
        return redone
    marked = (line | ({"superseded": True} if line[key] > after else {}) for line in _lines(path))
    write_atomic(path, ((json.dumps(line) + "\n").encode() for line in marked))
    return redone


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                where = f"{path}:{number}"
                raise UserError(Problem(where, "not JSON", "was it edited?")) from error


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
