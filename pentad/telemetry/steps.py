"""JSON-lines files of a run (steps, samples, evaluations): appends and reads complete lines.

A line is visible to readers as soon as `append` returns. A crash can leave only the last line
incomplete: readers skip it, and opening the file for appending removes it. Lines of steps that a
resumed run repeats are kept, marked `superseded`, and readers skip them.
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
"""File -> integer key that each of its lines has."""
EDITED = "was it edited? Without the line the run can continue"


class LineWriter:
    """Appends JSON objects to a file. A failed write (disk full) leaves no incomplete line."""

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
        """Closes the file. A second call has no effect."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


def read_lines(path: Path, *, superseded: bool = False) -> list[dict[str, Any]]:
    """The complete lines, without superseded ones by default; empty if there is no file. UserError
    for an invalid line before the last."""
    return [line for line in _lines(path) if superseded or not line.get("superseded")]


def supersede(path: Path, *, after: int, key: str = "step") -> set[int]:
    """Marks lines after step (or version) `after`, which a resumed run repeats; returns their keys.
    The file must not be open for writing."""
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
    """Context for reading fields of records: a missing field or a wrong type raises UserError."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        rule = f"a record lacks fields of a run ({type(error).__name__}: {error})"
        raise UserError(Problem(str(path), rule, EDITED)) from error


def _whole_bytes(path: Path) -> int:
    """Length of the file up to and including the last line break."""
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
