"""An index of samples.jsonl: what filters ask for, by line; texts are read when they are shown.

A line of the index takes about 50 bytes, so that a file of a gigabyte fits easily. Fields are taken
from the bytes of a line, as `telemetry/samples.py` writes them: inside a JSON string a quote is
escaped, so what looks like a key is one. Lines of another form are parsed.
"""

from __future__ import annotations

import io
import json
import re
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pentad.view.lines import GrowingLines, parse

HEAD = re.compile(
    rb'\{"step": (\d+), "pick": "(\w+)", "gid": (\d+), "index": (\d+), '
    rb'(?:"environment": (?:null|"([^"\\]*)"), )?"epoch"'
)
REST = re.compile(
    rb', "reward": ([-+.\w]+), "reward_parts": .*?, "finish": "(\w+)", "num_sampled": (\d+), '
    rb'"min_version": (\w+), "max_version": (\w+), '
)
QUESTION, PROMPT = b'"question": "', b', "prompt": '
SUPERSEDED = b'"superseded": true'
TYPES = {
    **{"offset": "q", "step": "q", "gid": "q", "prompt": "Q", "reward": "f", "length": "q"},
    **{"min_version": "q", "max_version": "q", "pick": "b", "finish": "b", "environment": "h"},
}
MAX_ENVIRONMENTS = 1000
WORDS: dict[str, Sequence[str]] = {
    "pick": ("best", "worst", "random"),
    "finish": ("stop", "length", "abort"),
}
SHOWN_TEXTS = ("question", "prompt", "text", "expected", "turns")
LISTED_CHARS = 2000
"""Characters of a text in a list; the sample's own page has all."""
TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Which samples are wanted; null takes all."""

    step: int | None = None
    pick: str | None = None
    finish: str | None = None
    environment: str | None = None
    prompt: int | None = None
    """Fingerprint of a question."""
    gid: int | None = None
    version: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    text: str = ""
    """Words that question, answer or a turn contains, ignoring case."""
    order: str = "newest"
    """newest, oldest, best, worst, longest or shortest."""


class SampleIndex:
    def __init__(self, path: Path) -> None:
        self.file = GrowingLines(path)
        self._clear()

    def _clear(self) -> None:
        self.columns = {name: array(kind) for name, kind in TYPES.items()}
        self.num_unreadable = 0
        self.environments: list[str] = []
        """Names of those that samples are of, in the order of their first one."""

    @property
    def num_lines(self) -> int:
        return len(self.columns["offset"])

    def advance(self, budget_s: float) -> None:
        end = time.monotonic() + budget_s
        if self.file.look():
            self._clear()
        while lines := self.file.take():
            for offset, line in lines:
                self._add(offset, line)
            if time.monotonic() > end:
                return

    def _add(self, offset: int, line: bytes) -> None:
        fields = _row(_from_bytes(line) or parse(line))
        if fields is None:
            self.num_unreadable += 1
        elif SUPERSEDED not in line[-60:]:
            fields["environment"] = self._number(fields["environment"])
            for name, value in fields.items():
                self.columns[name].append(value)
            self.columns["offset"].append(offset)

    def _number(self, environment: str) -> int:
        if environment not in self.environments and len(self.environments) < MAX_ENVIRONMENTS:
            self.environments.append(environment)
        known = environment in self.environments
        return self.environments.index(environment) if known else -1

    def last_step(self) -> int | None:
        """The newest step with samples, whether it is indexed or not."""
        if self.file.share < 1.0:
            steps = [
                r["step"] for r in self.file.tail(TAIL_BYTES) if isinstance(r.get("step"), int)
            ]
            return steps[-1] if steps else None
        steps_known = self.columns["step"]
        return steps_known[-1] if steps_known else None

    def find(self, wanted: SampleFilter, skip: int, most: int, budget_s: float) -> dict[str, Any]:
        """Samples that fit, in their order, as a list shows them; `next` is where to continue."""
        if self.file.share < 1.0 and wanted.step is not None and wanted.step == self.last_step():
            tail = [r for r in self.file.tail(TAIL_BYTES) if r.get("step") == wanted.step]
            return {"samples": [listed(r) for r in tail[:most]], "total": len(tail), "next": None}
        rows = self._fitting(wanted)
        end = time.monotonic() + budget_s
        found: list[dict[str, Any]] = []
        place = skip
        with self.file.path.open("rb") if len(rows) else io.BytesIO() as file:
            for place in range(skip, len(rows)):
                if len(found) == most or time.monotonic() > end:
                    break
                record = self._read(file, int(rows[place]), wanted.text)
                if record is not None:
                    found.append(listed(record))
            else:
                place = len(rows)
        total = None if wanted.text else len(rows)
        return {"samples": found, "total": total, "next": place if place < len(rows) else None}

    def _fitting(self, wanted: SampleFilter) -> np.ndarray:
        """Rows in the order that is asked for."""
        have = {name: np.array(column) for name, column in self.columns.items()}
        keep = np.ones(self.num_lines, dtype=bool)
        for name in ("step", "prompt", "gid"):
            if (value := getattr(wanted, name)) is not None:
                keep &= have[name] == value
        for name, words in {**WORDS, "environment": self.environments}.items():
            if (word := getattr(wanted, name)) is not None:
                keep &= have[name] == (words.index(word) if word in words else -2)
        if wanted.version is not None:
            keep &= (have["min_version"] <= wanted.version) & (
                have["max_version"] >= wanted.version
            )
        for name in ("reward", "length"):
            low, high = getattr(wanted, f"min_{name}"), getattr(wanted, f"max_{name}")
            if low is not None:
                keep &= have[name] >= low
            if high is not None:
                keep &= have[name] <= high
        rows = np.flatnonzero(keep)
        by = {"best": "reward", "worst": "reward", "longest": "length", "shortest": "length"}
        if wanted.order in by:
            values = have[by[wanted.order]][rows].astype(float)
            values = -values if wanted.order in ("best", "longest") else values
            return rows[np.argsort(values, kind="stable")]
        return rows if wanted.order == "oldest" else rows[::-1]

    def _read(self, file: BinaryIO, row: int, text: str) -> dict[str, Any] | None:
        """The record of a row, if the words are in it."""
        file.seek(self.columns["offset"][row])
        line = file.readline()
        if text and json.dumps(text)[1:-1].lower().encode() not in line.lower():
            return None
        record = parse(line)
        if record is None or (text and not any(text.lower() in s.lower() for s in _texts(record))):
            return None
        return record

    def group(self, step: int, gid: int) -> list[dict[str, Any]]:
        """The recorded samples of a group."""
        rows = self._fitting(SampleFilter(step=step, gid=gid, order="oldest"))
        found = [self.file.at(self.columns["offset"][row]) for row in rows]
        if not found and self.file.share < 1.0:
            tail = self.file.tail(TAIL_BYTES)
            found = [r for r in tail if r.get("step") == step and r.get("gid") == gid]
        return [record for record in found if record is not None]


def _from_bytes(line: bytes) -> dict[str, Any] | None:
    """The fields of a record that an index holds, of a line in the usual form."""
    head, rest = HEAD.match(line), REST.search(line)
    start = line.find(QUESTION)
    end = line.find(PROMPT, start)
    if head is None or rest is None or start < 0 or end < 0:
        return None
    if head[5] is None and b'"environment": "' in line:
        return None  # it stands elsewhere
    try:
        return {
            **{"step": int(head[1]), "pick": head[2].decode(), "gid": int(head[3])},
            "environment": (head[5] or b"").decode(),
            "prompt_key": zlib.crc32(line[start + len(QUESTION) - 1 : end]),
            "reward": None if rest[1] == b"null" else float(rest[1]),
            **{"finish": rest[2].decode(), "num_sampled": int(rest[3])},
            "min_version": None if rest[4] == b"null" else int(rest[4]),
            "max_version": None if rest[5] == b"null" else int(rest[5]),
        }
    except (ValueError, OverflowError):
        return None


def _row(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A line of the index, but for its offset."""
    if record is None or not isinstance(record.get("step"), int):
        return None
    names = {
        "gid": "gid",
        "length": "num_sampled",
        **{n: n for n in ("min_version", "max_version")},
    }
    found = {name: record.get(key) for name, key in names.items()}
    reward, key = record.get("reward"), record.get("prompt_key")
    return {
        **{name: value if isinstance(value, int) else -1 for name, value in found.items()},
        **{"step": record["step"], "prompt": fingerprint(record) if key is None else key},
        "reward": float(reward) if isinstance(reward, int | float) else float("nan"),
        **{name: _code(name, record.get(name)) for name in WORDS},
        "environment": str(record.get("environment") or ""),
    }


def _code(name: str, word: Any) -> int:
    """A word's number; new ones are -1."""
    return WORDS[name].index(word) if word in WORDS[name] else -1


def fingerprint(record: Mapping[str, Any]) -> int:
    """The same for the same question."""
    return zlib.crc32(json.dumps(str(record.get("question", ""))).encode())


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    for name in SHOWN_TEXTS:
        value = record.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, Sequence):
            yield from (str(word) for turn in value if isinstance(turn, list) for word in turn)


def listed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as a list has it: without token ids, long texts cut."""
    kept = {k: v for k, v in record.items() if k not in ("ids", "trained_spans", "nonfinite")}
    is_cut = False
    for name in SHOWN_TEXTS:
        value = kept.get(name)
        if isinstance(value, str) and len(value) > LISTED_CHARS:
            kept[name], is_cut = value[:LISTED_CHARS] + " ...", True
    return kept | {"prompt_key": fingerprint(record), "is_cut": is_cut}
