"""An index of samples.jsonl with the values that filters need; texts are read when they are shown.

A line of the index takes about 90 bytes, so that a file of a gigabyte fits easily.
"""

from __future__ import annotations

import io
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from pentad.view.lines import GrowingLines, number, parse
from pentad.view.steps import Columns

NUMBERS = {
    **{"step": "step", "gid": "gid", "reward": "reward", "length": "num_sampled"},
    **{"min_version": "min_version", "max_version": "max_version"},
}
"""Columns of the index by the fields of a record."""
WORDS = ("pick", "finish", "environment")
"""Columns that store a number for each word."""
MAX_WORDS = 1000
SHOWN_TEXTS = ("question", "prompt", "text", "expected", "turns")
LISTED_CHARS = 2000
"""Maximum characters of a text in a list; the page of the sample has the whole text."""
STEP_BYTES = 1 << 20
"""Bytes to read for a step that is not indexed yet."""


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Filter of samples; null accepts all."""

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


class SampleIndex(GrowingLines):
    def clear(self) -> None:
        self.columns = Columns()
        self.num_unreadable = 0
        self.words: dict[str, dict[str, int]] = {name: {} for name in WORDS}
        """Column -> word -> number, in the order of first appearance."""

    def add(self, offset: int, line: bytes) -> None:
        record = parse(line)
        if record is None or not isinstance(number(record.get("step")), int):
            self.num_unreadable += 1
        elif not record.get("superseded"):
            row = {name: number(record.get(field)) for name, field in NUMBERS.items()}
            row |= {name: self._code(name, record.get(name)) for name in WORDS}
            row |= {"offset": offset, "prompt": fingerprint(record)}
            self.columns.add({name: value for name, value in row.items() if value is not None})

    def _code(self, name: str, word: Any) -> int | None:
        known = self.words[name]
        if isinstance(word, str) and (word in known or len(known) < MAX_WORDS):
            return known.setdefault(word, len(known))
        return None

    def last_step(self) -> int | None:
        """The newest step with samples, whether it is indexed or not."""
        if self.share < 1.0:
            steps = [number(record.get("step")) for record in self.tail(STEP_BYTES)]
            return next((int(step) for step in reversed(steps) if step is not None), None)
        known = self.columns.of("step")
        return int(known[-1]) if len(known) else None

    def _of_step(self, step: int | None) -> SampleIndex:
        """This index; or a new one for only this step if the file is not fully read."""
        if self.share == 1.0 or step is None:
            return self
        found = SampleIndex(self.path)
        for offset, line in self.between("step", step, step, STEP_BYTES):
            found.add(offset, line)
        return found

    def find(self, wanted: SampleFilter, skip: int, most: int, budget_s: float) -> dict[str, Any]:
        """Matching samples in the requested order, in list form; `next` is where to continue."""
        offsets = self._of_step(wanted.step).offsets(wanted)
        end = time.monotonic() + budget_s
        found: list[dict[str, Any]] = []
        place = skip
        with self.path.open("rb") if offsets else io.BytesIO() as file:
            for place in range(skip, len(offsets)):
                if len(found) == most or time.monotonic() > end:
                    break
                record = _read(file, offsets[place], wanted.text)
                if record is not None:
                    found.append(listed(record))
            else:
                place = len(offsets)
        total = None if wanted.text else len(offsets)
        return {"samples": found, "total": total, "next": place if place < len(offsets) else None}

    def offsets(self, wanted: SampleFilter) -> list[int]:
        """Offsets of matching lines in the requested order, ignoring text search."""
        have = self.columns.of
        keep = np.ones(self.columns.num_rows, dtype=bool)
        for name in ("step", "prompt", "gid", *WORDS):
            if (value := getattr(wanted, name)) is not None:
                keep &= have(name) == (self.words[name].get(value, -1) if name in WORDS else value)
        if wanted.version is not None:
            keep &= have("min_version") <= wanted.version
            keep &= have("max_version") >= wanted.version
        for name in ("reward", "length"):
            low, high = getattr(wanted, f"min_{name}"), getattr(wanted, f"max_{name}")
            if low is not None:
                keep &= have(name) >= low
            if high is not None:
                keep &= have(name) <= high
        rows = np.flatnonzero(keep)
        by = {"best": "reward", "worst": "reward", "longest": "length", "shortest": "length"}
        if wanted.order in by:
            values = have(by[wanted.order])[rows]
            values = -values if wanted.order in ("best", "longest") else values
            rows = rows[np.argsort(values, kind="stable")]
        elif wanted.order != "oldest":
            rows = rows[::-1]
        return list(have("offset")[rows].astype(int).tolist())

    def group(self, step: int, gid: int) -> list[dict[str, Any]]:
        """The recorded samples of a group."""
        wanted = SampleFilter(step=step, gid=gid, order="oldest")
        found = [self.at(offset) for offset in self._of_step(step).offsets(wanted)]
        return [record for record in found if record is not None]


def _read(file: BinaryIO, offset: int, text: str) -> dict[str, Any] | None:
    """The record at this offset, if it contains the text."""
    file.seek(offset)
    line = file.readline()
    if text and json.dumps(text)[1:-1].lower().encode() not in line.lower():
        return None
    record = parse(line)
    if record is None or (text and not any(text.lower() in s.lower() for s in _texts(record))):
        return None
    return record


def fingerprint(record: Mapping[str, Any]) -> int:
    """A number that identifies the question."""
    return zlib.crc32(str(record.get("question", "")).encode("utf-8", "replace"))


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    for name in SHOWN_TEXTS:
        value = record.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (str(word) for turn in value if isinstance(turn, list) for word in turn)


def listed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A sample in list form: without token ids, with long texts truncated."""
    kept = {k: v for k, v in record.items() if k not in ("ids", "trained_spans", "nonfinite")}
    for name in SHOWN_TEXTS:
        value = kept.get(name)
        if isinstance(value, str) and len(value) > LISTED_CHARS:
            kept[name] = value[:LISTED_CHARS] + " ..."
    return kept | {"prompt_key": fingerprint(record)}
