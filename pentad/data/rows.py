"""Rows of a dataset on disk, by index: JSON lines in this file, Parquet and Arrow in arrow.py.

A path is a file (.jsonl, .ndjson, .parquet, .arrow), a folder saved by HF `datasets`
(`save_to_disk`), a folder of such files, or a pattern such as `data/train-*.parquet`. Rows keep
their order: files by name, then lines. This module does not depend on prompts, tokens or torch.

When streaming, JSON lines need 16 bytes of memory per row (offset and line number) and are parsed
on access; otherwise all rows are parsed at the start, and all broken lines are reported.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol

from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.folders import MAX_ROW_BYTES, read_object, what_else
from pentad.data.section import VERIFIERS, is_made
from pentad.data.stamp import Stamp
from pentad.data.verifiers_rows import VerifiersRows

Format = Literal["auto", "jsonl", "parquet", "hf"]
FileKind = Literal["jsonl", "parquet", "arrow", "tokens", "text"]

SUFFIXES: dict[str, FileKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
STREAMS: dict[str, FileKind] = {".npy": "tokens", ".bin": "tokens", ".txt": "text", ".md": "text"}
"""File types without rows; `data.shards` reads them."""
SPLIT = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?![a-z])")
"""Names of splits in published folders; reading several splits as one would train on test data."""
MAX_PROBLEMS = 20


class DatasetRows(Protocol):
    @property
    def digest(self) -> bytes:
        """A digest of the rows."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """The row; raises UserError with file and line if it cannot be read."""
        ...

    def where(self, index: int) -> str:
        """`file:line`, counted from 1."""
        ...


class JsonLines:
    """One JSON object per line; blank lines are skipped."""

    def __init__(self, path: Path, *, streaming: bool = False, limit: int | None = None) -> None:
        self.path = path
        self.limit = limit
        self.stamp = Stamp(path)
        self.file = path.open("rb")
        self.starts = array("q")
        self.lines = array("q")
        self.digest = self._scan(limit)
        """Digest of the lines that were scanned."""
        self.parsed: list[dict[str, Any]] | None = None
        if not streaming:
            self.parsed = self._parse_all()

    def __len__(self) -> int:
        return len(self.lines)

    def row(self, index: int) -> dict[str, Any]:
        if self.parsed is not None:
            return self.parsed[index]
        if self.stamp.is_changed:
            self._open_again()
        return self._parse(index)

    def _open_again(self) -> None:
        """Reopens a file that was touched or replaced, if its rows are unchanged."""
        again = JsonLines(self.path, streaming=True, limit=self.limit)
        if again.digest != self.digest:
            raise self.stamp.refusal()
        self.stamp, self.file = again.stamp, again.file

    def where(self, index: int) -> str:
        return f"{self.path}:{self.lines[index]}"

    def _scan(self, limit: int | None) -> bytes:
        start, digest = 0, hashlib.blake2b(digest_size=16)
        lines = iter(lambda: self.file.readline(MAX_ROW_BYTES + 1), b"")
        for number, line in enumerate(lines, 1):
            if limit is not None and len(self.lines) == limit:
                break
            if len(line) > MAX_ROW_BYTES:
                rule = f"the line is longer than {MAX_ROW_BYTES >> 20} MiB"
                raise UserError(Problem(f"{self.path}:{number}", rule, "split the row"))
            digest.update(line)
            if line.strip():
                self.starts.append(start)
                self.lines.append(number)
            start += len(line)
        self.starts.append(start)
        return digest.digest()

    def _parse(self, index: int) -> dict[str, Any]:
        start, end = self.starts[index], self.starts[index + 1]
        # pread does not change the file position, so threads can read concurrently.
        line = os.pread(self.file.fileno(), end - start, start)
        if self.parsed is None and self.stamp.is_changed:  # during the read
            self._open_again()
        return parse_row(line, self.where(index))

    def _parse_all(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        problems: list[Problem | str] = []
        for index in range(len(self)):
            try:
                rows.append(self._parse(index))
            except UserError as error:
                problems += error.problems
        raise_first(problems)
        return rows


class Joined:
    """Several files as one sequence."""

    def __init__(self, parts: Sequence[DatasetRows]) -> None:
        self.parts = parts
        self.ends = list(accumulate(len(part) for part in parts))

    @cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(b"".join(part.digest for part in self.parts)).digest()

    def __len__(self) -> int:
        return self.ends[-1]

    def row(self, index: int) -> dict[str, Any]:
        part, inner = self._find(index)
        return part.row(inner)

    def where(self, index: int) -> str:
        part, inner = self._find(index)
        return part.where(inner)

    def _find(self, index: int) -> tuple[DatasetRows, int]:
        which = bisect.bisect_right(self.ends, index)
        return self.parts[which], index - (self.ends[which - 1] if which else 0)


def open_rows(
    path: str,
    *,
    format: Format = "auto",
    streaming: bool = False,
    limit: int | None = None,
    key: str = "path",
) -> DatasetRows:
    """Opens the rows at `path`, at least one; `key` is the config key for errors."""
    where = f"{key} = {path}"
    if is_made(path):
        return _made(path, limit, where)
    parts: list[DatasetRows] = []
    left = limit
    for file, kind in find_files(path, format, where):
        part = _open_file(file, kind, where, streaming=streaming, limit=left)
        parts.append(part)
        left = None if left is None else left - len(part)
        if left == 0:
            break
    rows = parts[0] if len(parts) == 1 else Joined(parts)
    if not len(rows):
        raise UserError(Problem(where, "it has no rows", "give a file with rows"))
    return rows


def _made(path: str, limit: int | None, where: str) -> DatasetRows:
    if path.startswith(f"{VERIFIERS}:"):
        return VerifiersRows(path, limit=limit, where=where)
    try:
        from pentad.data.reasoning_gym_rows import ReasoningRows
    except ImportError as error:
        rule = f"needs the package reasoning-gym ({error})"
        raise UserError(Problem(where, rule, "pip install 'pentad[reasoning-gym]'")) from error
    return ReasoningRows(path, limit=limit, where=where)


def find_files(
    path: str, format: Format, where: str, suffixes: Mapping[str, FileKind] = SUFFIXES
) -> list[tuple[Path, FileKind]]:
    """The files of rows in order, with the kind of each. Pipes and devices are rejected: reading
    them may never end."""
    found = _named_files(path, format, where, suffixes)
    for file, _ in found:
        if file.exists() and (other := what_else(file)):
            remedy = "leave it out, or copy its content to a file"
            raise UserError(Problem(where, f"{file.name} {other}, not a file", remedy))
    return found


def _named_files(
    path: str, format: Format, where: str, suffixes: Mapping[str, FileKind]
) -> list[tuple[Path, FileKind]]:
    root = Path(path).expanduser()
    if not root.exists() and any(character in path for character in "*?["):
        files = sorted(root.parent.glob(root.name))
        if not files:
            raise UserError(Problem(where, "no file fits this pattern"))
        return [(file, _kind(file, format, where, suffixes)) for file in files]
    if not root.exists():
        raise UserError(Problem(where, "no such file or folder"))
    if not root.is_dir():
        if format == "hf":
            rule = "format = hf reads a folder that datasets saved, and this is a file"
            raise UserError(Problem(where, rule, "leave format out"))
        return [(root, _kind(root, format, where, suffixes))]
    if (root / "dataset_dict.json").exists():
        splits = _read_list(root / "dataset_dict.json", "splits", where)
        choices = " or ".join(str(root / split) for split in splits)
        raise UserError(Problem(where, "this folder holds several splits", f"give {choices}"))
    if (root / "state.json").exists():
        return _saved_files(root, where)
    return _folder_files(root, format, where, suffixes)


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Parses one line as an object; raises UserError with its problem."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(Problem(where, f"not UTF-8 (byte {error.start} of the line)")) from error
    except json.JSONDecodeError as error:
        rule = f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        raise UserError(Problem(where, rule, "one JSON object a line")) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise UserError(Problem(where, f"cannot be read: {error}")) from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise UserError(Problem(where, f"holds a {kind}", "one JSON object a line"))
    return value


def raise_first(problems: Sequence[Problem | str]) -> None:
    """Raises a UserError with the first few problems, equal ones merged; returns if there are
    none."""
    alike: dict[object, list[Problem | str]] = {}
    for problem in problems:
        key = (problem.rule, problem.remedy) if isinstance(problem, Problem) else problem
        alike.setdefault(key, []).append(problem)
    shown = [_with_count(found[0], len(found)) for found in alike.values()]
    if len(shown) > MAX_PROBLEMS:
        rest = sum(map(len, [*alike.values()][MAX_PROBLEMS:]))
        raise UserError([*shown[:MAX_PROBLEMS], f"and {rest} more rows with other problems"])
    raise_problems(shown)


def _with_count(first: Problem | str, count: int) -> Problem | str:
    if count == 1 or isinstance(first, str):
        return first
    rows = "row" if count == 2 else "rows"
    return replace(first, rule=f"{first.rule} (and {count - 1:,} more {rows} alike)")


def _kind(file: Path, format: Format, where: str, suffixes: Mapping[str, FileKind]) -> FileKind:
    if format in ("jsonl", "parquet"):
        return "jsonl" if format == "jsonl" else "parquet"
    if file.suffix not in suffixes:
        known = ", ".join(suffixes)
        remedy = f"known endings: {known}; or set format: jsonl or parquet"
        raise UserError(Problem(where, f"{file.name} has no known ending", remedy))
    return suffixes[file.suffix]


def _read_list(file: Path, name: str, where: str) -> list[Any]:
    """Reads a list from a JSON file of a saved dataset; empty if the file has no such key."""
    try:
        found = read_object(file).get(name) or []
    except (OSError, UserError) as error:
        raise UserError(Problem(where, f"its {file.name} cannot be read: {error}")) from error
    if not isinstance(found, list):
        raise UserError(Problem(where, f"its {file.name} has {name} = {found}, not a list"))
    return found


def _saved_files(root: Path, where: str) -> list[tuple[Path, FileKind]]:
    """The files of a dataset that HF `datasets` wrote with save_to_disk."""
    if _read_list(root / "state.json", "_indices_data_files", where):
        remedy = "save it again after flatten_indices()"
        raise UserError(Problem(where, "the saved dataset is a selection by indices", remedy))
    entries = _read_list(root / "state.json", "_data_files", where)
    named = [entry for entry in entries if isinstance(entry, dict) and entry.get("filename")]
    files = [root / str(entry["filename"]) for entry in named]
    missing = [file.name for file in files if not file.exists()]
    if missing or not files:
        rule = f"state.json names files that are not there: {', '.join(missing) or 'none at all'}"
        raise UserError(Problem(where, rule))
    return [(file, "arrow") for file in files]


def _folder_files(
    root: Path, format: Format, where: str, suffixes: Mapping[str, FileKind]
) -> list[tuple[Path, FileKind]]:
    files = sorted(file for file in root.rglob("*") if file.suffix in suffixes and file.is_file())
    kinds = {suffixes[file.suffix] for file in files}
    if not files:
        known = ", ".join(suffixes)
        raise UserError(Problem(where, f"the folder holds no file that ends in {known}"))
    if len(kinds) > 1:
        rule = f"the folder holds files of several kinds: {', '.join(sorted(kinds))}"
        raise UserError(Problem(where, rule, "give one of them, or a pattern"))
    names = {file: SPLIT.search(str(file.relative_to(root)).lower()) for file in files}
    splits = sorted({match[1] if match else "" for match in names.values()})
    if len(splits) > 1:
        found = ", ".join(str(file.relative_to(root)) for file in files[:6])
        rule = f"the folder holds several splits ({found})"
        wanted = "train" if "train" in splits else splits[-1]
        one = next(file for file, match in names.items() if match and match[1] == wanted)
        example = one if len(files) == len(splits) else one.parent / f"*{wanted}*{one.suffix}"
        raise UserError(Problem(where, rule, f"give a file, or a pattern such as {example}"))
    return [(file, _kind(file, format, where, suffixes)) for file in files]


def _open_file(
    file: Path, kind: FileKind, where: str, *, streaming: bool, limit: int | None
) -> DatasetRows:
    if kind == "jsonl":
        try:
            return JsonLines(file, streaming=streaming, limit=limit)
        except OSError as error:
            raise UserError(Problem(where, f"{file} cannot be read: {error.strerror}")) from error
    assert kind != "tokens" and kind != "text", "they have no rows"
    try:
        from pentad.data.arrow import open_table
    except ModuleNotFoundError as error:
        remedy = "pip install 'pentad[parquet]'"
        raise UserError(Problem(where, f"{kind} files need {error.name}", remedy)) from error
    return open_table(file, kind, where, streaming=streaming, limit=limit)
