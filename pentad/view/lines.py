"""Whole lines of a file that another program appends to, read once and in pieces.

A torn last line is left until it is whole. A file that was replaced or cut (a resumed run marks
lines and writes the file anew) is read again from its beginning.
"""

from __future__ import annotations

import io
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

PIECE_BYTES = 4 << 20
MAX_LINE_BYTES = 256 << 20
"""A longer line is no record of a run; reading stops before it."""


class GrowingLines:
    """How far one file was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        """Everything before it was given out."""
        self.size = 0
        """The file's when it was last looked at."""
        self._identity: tuple[int, int] | None = None

    @property
    def share(self) -> float:
        """How much of the file was read."""
        return min(1.0, self.position / self.size) if self.size else 1.0

    def look(self) -> bool:
        """Notes the file's size; True if it is another file than before, or a shorter one."""
        try:
            found = self.path.stat()
        except OSError:
            is_gone = self._identity is not None
            self._identity, self.position, self.size = None, 0, 0
            return is_gone
        identity, self.size = (found.st_dev, found.st_ino), found.st_size
        is_other = self._identity not in (None, identity) or self.size < self.position
        self._identity = identity
        if is_other:
            self.position = 0
        return is_other

    def take(self) -> list[tuple[int, bytes]]:
        """The next lines with their offsets, a few MB of them; none at the end."""
        if self.position >= self.size:
            return []
        data = self._next_piece()
        lines, start = [], self.position
        for line in io.BytesIO(data):  # by line feeds alone
            lines.append((start, line))
            start += len(line)
        self.position = start
        return lines

    def _next_piece(self) -> bytes:
        """From the position to the end of a line."""
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
        """The record that begins there."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return parse(file.readline(MAX_LINE_BYTES))

    def between(self, key: str, low: float, high: float, most_bytes: int) -> list[dict[str, Any]]:
        """Records of a file in which the value of `key` only grows, from about the last one before
        `low` to the first beyond `high`."""
        start, end = 0, self.size
        with self.path.open("rb") as file:
            while end - start > 64 << 10:
                middle = (start + end) // 2
                file.seek(middle)
                file.readline()
                record = parse(file.readline())
                if record is None or record.get(key, low) >= low:
                    end = middle
                else:
                    start = middle
            file.seek(max(0, start - (64 << 10)))
            if file.tell():
                file.readline()
            records = map(parse, file.readlines(most_bytes))
            found = list(takewhile(lambda r: r.get(key, low) <= high, filter(None, records)))
        return found[sum(1 for one in found[1:] if one.get(key, low) <= low) :]

    def spread(self, count: int) -> list[dict[str, Any]]:
        """About so many records from all over the file, for a first look, and the last ones."""
        found = []
        with self.path.open("rb") as file:
            for number in range(count):
                file.seek(self.size * number // count)
                if number:
                    file.readline()
                found.append(parse(file.readline()))
        return [*(record for record in found if record), *self.tail(64 << 10)]

    def tail(self, num_bytes: int) -> list[dict[str, Any]]:
        """The records of the last bytes."""
        start = max(0, self.size - num_bytes)
        with self.path.open("rb") as file:
            file.seek(start)
            if start:
                file.readline()
            lines = file.read(num_bytes).split(b"\n")[:-1]
        return [record for record in map(parse, lines) if record]


def parse(line: bytes) -> dict[str, Any] | None:
    """None for what is no JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no such file, or nothing in it that can be read."""
    try:
        return parse(path.read_bytes())
    except OSError:
        return None


def newest_mtime(path: Path) -> float:
    """0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
