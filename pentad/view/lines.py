"""Reads complete lines of a file that another program appends to, incrementally.

An incomplete last line is left until it is complete. A file that was replaced or truncated (a
resumed run marks lines and rewrites the file) is read again from the start. Lines may be any JSON,
or invalid: `number`, `part` and `dicts` return only values of the expected form.
"""

from __future__ import annotations

import io
import json
import stat
import time
from itertools import takewhile
from pathlib import Path
from typing import Any

PIECE_BYTES = 1 << 20
MAX_LINE_BYTES = 256 << 20
"""A longer line is not a record of a run; reading stops before it."""
PlacedLine = tuple[int, bytes]
"""(offset, bytes with the line feed) of a line."""
LARGE = 2**53
"""Larger counts or times are rejected; floats represent integers exactly up to here."""


class GrowingLines:
    """A file and the position up to which it was read. Subclasses store lines in `add`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        """Offset of the first line that was not returned yet."""
        self.size = 0
        """Size of the file at the last `look`."""
        self._is_read = False
        self._identity: tuple[int, int] | None = None
        self.clear()

    def clear(self) -> None:
        """Removes all stored lines, because the file was replaced."""

    def add(self, offset: int, line: bytes) -> None:
        """Adds a new line."""

    @property
    def share(self) -> float:
        """Share of the file that was read; 1 if only an incomplete line is left."""
        return 1.0 if self._is_read or not self.size else min(1.0, self.position / self.size)

    def look(self) -> None:
        """Updates the size; calls `clear` if the file was replaced or truncated."""
        try:
            found = self.path.stat()
        except OSError:
            found = None
        identity, self.size = None, 0
        if found is not None and stat.S_ISREG(found.st_mode):
            identity, self.size = (found.st_dev, found.st_ino), found.st_size
        if self._identity not in (None, identity) or self.size < self.position:
            self.position = 0
            self.clear()
        self._identity = identity

    def advance(self, budget_s: float = float("inf")) -> None:
        """Reads new lines, for at most `budget_s` seconds."""
        end, self._is_read = time.monotonic() + budget_s, False
        self.look()
        while lines := self.take():
            for offset, line in lines:
                self.add(offset, line)
            if time.monotonic() > end:
                return
        self._is_read = True

    def take(self) -> list[PlacedLine]:
        """The next lines with their offsets, about a MB of them; none at the end."""
        if self.position >= self.size:
            return []
        data = self._next_piece()
        lines, start = [], self.position
        for line in io.BytesIO(data):  # splits at line feeds only
            lines.append((start, line))
            start += len(line)
        self.position = start
        return lines

    def _next_piece(self) -> bytes:
        """Bytes from the position to the end of a line."""
        length = PIECE_BYTES
        with self.path.open("rb") as file:
            while True:
                file.seek(self.position)
                data = file.read(length)
                end = data.rfind(b"\n") + 1
                if end or len(data) < length or length > MAX_LINE_BYTES:
                    return data[:end]
                length *= 4

    def at(self, offset: int) -> dict[str, Any] | None:
        """The record at this offset, or None."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return parse(file.readline(MAX_LINE_BYTES))

    def between(self, key: str, low: float, high: float, most_bytes: int) -> list[PlacedLine]:
        """Lines from the last one before `low` to the last one up to `high`, in a file with
        increasing values of `key`, found without an index."""
        start, end = 0, self.size
        found: list[PlacedLine] = []

        def value(line: bytes) -> float:
            known = number(part(parse(line), key))
            return low if known is None else known

        with self.path.open("rb") if end else io.BytesIO() as file:
            while end - start > 64 << 10:
                middle = (start + end) // 2
                file.seek(middle)
                file.readline()
                if value(file.readline()) >= low:
                    end = middle
                else:
                    start = middle
            offset = file.seek(max(0, start - (64 << 10)))
            offset += len(file.readline()) if offset else 0
            for line in takewhile(lambda line: value(line) <= high, file):
                is_before = value(line) < low
                if is_before:
                    found.clear()
                found.append((offset, line))
                offset += len(line)
                if not is_before and offset - found[0][0] > most_bytes:
                    break
        return found

    def spread(self, count: int) -> list[dict[str, Any]]:
        """About `count` records spread over the file, and the last ones, for a first overview."""
        found = []
        with self.path.open("rb") as file:
            for place in range(count):
                file.seek(self.size * place // count)
                if place:
                    file.readline()
                found.append(parse(file.readline()))
        return [*(record for record in found if record), *self.tail(64 << 10)]

    def tail(self, num_bytes: int) -> list[dict[str, Any]]:
        """The records in the last `num_bytes` of the file."""
        start = max(0, self.size - num_bytes)
        with self.path.open("rb") as file:
            file.seek(start)
            if start:
                file.readline()
            lines = file.read(num_bytes).split(b"\n")[:-1]
        return [record for record in map(parse, lines) if record]


def parse(line: bytes) -> dict[str, Any] | None:
    """Parses a line; None if it is not a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_bytes(path: Path) -> bytes:
    """The bytes of a file; empty if it does not exist."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty if it is missing or invalid."""
    return parse(read_bytes(path)) or {}


def newest_mtime(path: Path) -> float:
    """Modification time of a path; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def number(value: Any) -> float | None:
    """The value as a number; None if it is not a finite number."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_one and abs(value) < LARGE else None


def part(record: Any, *names: str) -> Any:
    """The value at a path of nested names; None if it does not exist."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def dicts(value: Any) -> list[dict[str, Any]]:
    """The dicts in a list; empty for any other value."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
