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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.core.files import write_atomic
from pentad.core.folders import parse_json

KEYS = {"steps.jsonl": "step", "samples.jsonl": "step", "evals.jsonl": "version"}
"""File -> the key that each of its lines has, a whole number."""
EDITED = "was it edited? Without the line the run can continue"


class LineWriter:
    """Appends JSON objects to one file. A write that fails (disk full) leaves no half line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self.size = _whole_bytes(path)
            os.ftruncate(self.file, self.size)
        except BaseException:
            self.close()
            raise

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
        """A second call does nothing: the number may belong to another file by then."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


def read_lines(path: Path, *, superseded: bool = False) -> list[dict[str, Any]]:
    """Every complete line that is not superseded (or all); none without a file. A broken line
    before the last is an error."""
    return [line for line in _lines(path) if superseded or not line.get("superseded")]


def supersede(path: Path, *, after: int, key: str = "step") -> set[int]:
    """Marks the lines beyond step (or version) `after`, which a resumed run repeats; returns them.
    For a file that no writer has open."""
    with reading_records(path):
        redone = {line[key] for line in read_lines(path) if line[key] > after}
    if not redone:
        return redone
    marked = (line | ({"superseded": True} if line[key] > after else {}) for line in _lines(path))
    write_atomic(path, ((json.dumps(line) + "\n").encode() for line in marked))
    return redone


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    key = KEYS.get(path.name)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            where = f"{path}:{number}"
            try:
                value = parse_json(line)
            except ValueError as error:
                raise UserError(Problem(where, "not JSON", EDITED)) from error
            if not isinstance(value, dict) or (key and type(value.get(key)) is not int):
                raise UserError(Problem(where, "no record of a run", EDITED))
            yield value


@contextmanager
def reading_records(path: Path) -> Iterator[None]:
    """While active, fields of records are read: a missing one, or one of another type, is bad
    input."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        rule = f"a record lacks what a run writes ({type(error).__name__}: {error})"
        raise UserError(Problem(str(path), rule, EDITED)) from error


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
