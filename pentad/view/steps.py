"""The numbers of steps.jsonl as columns in memory, and reduced to the points of a chart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pentad.telemetry.record import SCHEMA
from pentad.view.lines import LARGE, GrowingLines, number, parse

FIRST_LOOK = 400
"""Number of records sampled over a file that is not indexed yet."""
SMALL_BYTES = 8 << 20
"""A file up to this size is indexed in one call."""
MAX_COLUMNS = 1500
MAX_SCHEMAS = 5
MAX_DEPTH = 8
NO_COLUMNS = ("kernel/balance", "nonfinite")
"""Parts without columns: too many numbers, or none; the record of a step has them."""


class Columns:
    """Rows of numbers by path; NaN where a record has none."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.by_path: dict[str, np.ndarray] = {}
        self._room = 1024

    def add(self, values: Mapping[str, float]) -> None:
        row = self.num_rows
        if row == self._room:
            self._room *= 2
            for path, old in self.by_path.items():
                self.by_path[path] = np.concatenate([old, np.full(self._room - row, np.nan)])
        for path, value in values.items():
            column = self.by_path.get(path)
            if column is None:
                if len(self.by_path) >= MAX_COLUMNS:
                    continue
                column = self.by_path[path] = np.full(self._room, np.nan)
            column[row] = value
        self.num_rows += 1

    def of(self, path: str) -> np.ndarray:
        column = self.by_path.get(path)
        return np.full(self.num_rows, np.nan) if column is None else column[: self.num_rows]


class StepIndex(GrowingLines):
    """The steps of one run; `advance` reads new ones."""

    def clear(self) -> None:
        self.columns = Columns()
        self.offsets: list[int] = []
        self.first_look: Columns | None = None
        self.last: dict[str, Any] | None = None
        """The newest record."""
        self.num_unreadable = 0
        self.starts: dict[int, dict[str, float]] = {}
        """Generation -> begin of its first step, end of its last one, number of steps that a later
        start repeated, and their seconds."""
        self.other_schemas: set[str] = set()

    @property
    def shown(self) -> Columns:
        """All rows, or the sampled ones while the file is not indexed."""
        return self.first_look or self.columns

    def advance(self, budget_s: float = float("inf")) -> None:
        """Reads new lines within the time budget; the first call only samples a large file."""
        self.look()
        is_large = self.size - self.position > SMALL_BYTES
        if not is_large:
            super().advance()
        elif self.first_look is None and not self.offsets:
            self.first_look = Columns()
            for record in _in_order(self.spread(FIRST_LOOK)):
                self.first_look.add(numbers_of(record))
                self.last = record
        else:
            super().advance(budget_s)
        if self.share == 1.0:
            self.first_look = None

    def add(self, offset: int, line: bytes) -> None:
        record = parse(line)
        if record is None or not _is_step(record):
            self.num_unreadable += 1
            return
        if record.get("schema") != SCHEMA and len(self.other_schemas) < MAX_SCHEMAS:
            self.other_schemas.add(str(record.get("schema"))[:20])
        self._note_start(record)
        if record.get("superseded"):
            return
        self.columns.add(numbers_of(record))
        self.offsets.append(offset)
        if self.last is None or record["step"] >= self.last["step"]:
            self.last = record

    def _note_start(self, record: Mapping[str, Any]) -> None:
        time_s, wall_s = (number(record.get(name)) or 0.0 for name in ("time_s", "wall_clock_ms"))
        wall_s /= 1e3
        start = self.starts.setdefault(
            int(number(record.get("generation")) or 0),
            {"begin": time_s - wall_s, "redone": 0, "redone_s": 0.0},
        )
        start["end"] = time_s
        if record.get("superseded"):
            start["redone"] += 1
            start["redone_s"] += wall_s

    def record(self, step: int) -> dict[str, Any] | None:
        """The complete record of one step."""
        if self.last is not None and self.last["step"] == step:
            return self.last
        rows = np.flatnonzero(self.columns.of("step") == step)
        if len(rows):
            return self.at(self.offsets[int(rows[-1])])
        near = self.between("step", step, step, SMALL_BYTES) if self.share < 1.0 else []
        return next((r for _, line in near if (r := parse(line)) and r.get("step") == step), None)

    def step_at(self, time_s: float) -> int | None:
        """The first step recorded at or after this time, else the last step."""
        times, steps = self.shown.of("time_s"), self.shown.of("step")
        if not len(steps):
            return None
        row = min(int(np.searchsorted(times, time_s)), len(steps) - 1)
        return int(steps[row])

    def series(
        self, keys: Sequence[str], begin: float | None, end: float | None, points: int
    ) -> dict[str, Any]:
        """Columns of the steps from `begin` to `end`, with at most `points` points."""
        rows, columns = self._rows(begin, end), self.shown
        edges = _edges(rows, points)
        ends = np.append(edges[1:], rows.stop) - 1 if len(edges) else edges
        found: dict[str, Any] = {}
        for key in keys:
            if key in columns.by_path:
                found[key] = _bucketed(columns.of(key)[: rows.stop], edges, len(edges) == len(rows))
        return {
            "step": columns.of("step")[ends].astype(int).tolist(),
            "time": np.round(columns.of("time_s")[ends], 3).tolist(),
            "series": found,
            "rows": len(rows),
        }

    def _rows(self, begin: float | None, end: float | None) -> range:
        steps = self.shown.of("step")
        first = 0 if begin is None else int(np.searchsorted(steps, begin, "left"))
        last = len(steps) if end is None else int(np.searchsorted(steps, end, "right"))
        return range(first, max(first, last))


def _is_step(record: Mapping[str, Any]) -> bool:
    return isinstance(number(record.get("step")), int)


def _in_order(records: Iterable[Mapping[str, Any]]) -> list[Any]:
    by_step = {r["step"]: r for r in records if _is_step(r)}
    return [record for _, record in sorted(by_step.items()) if not record.get("superseded")]


def numbers_of(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Like `telemetry.record.scalars`, but faster and only for JSON values."""
    found: dict[str, float] = {}
    for key, value in record.items():
        kind = type(value)
        if kind is float or kind is bool or (kind is int and -LARGE < value < LARGE):
            found[prefix + key] = value
        elif kind is dict and prefix + key not in NO_COLUMNS and prefix.count("/") < MAX_DEPTH:
            found |= numbers_of(value, f"{prefix}{key}/")
    return found


def _edges(rows: range, points: int) -> np.ndarray:
    """Start rows of the buckets of a chart."""
    if len(rows) <= points:
        return np.arange(rows.start, rows.stop)
    return np.unique(np.linspace(rows.start, rows.stop, points, endpoint=False).astype(int))


def _bucketed(values: np.ndarray, edges: np.ndarray, is_exact: bool) -> dict[str, Any]:
    """Mean of each bucket, and minimum and maximum if buckets have several steps."""
    if is_exact:
        return {"mean": plain(values[edges])}
    known = ~np.isnan(values)
    counts = np.add.reduceat(known, edges)
    sums = np.add.reduceat(np.where(known, values, 0.0), edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, sums / counts, np.nan)
    lows, highs = np.fmin.reduceat(values, edges), np.fmax.reduceat(values, edges)
    return {"mean": plain(means), "min": plain(lows), "max": plain(highs)}


def plain(values: np.ndarray) -> list[float | None]:
    """Numbers for JSON: rounded to seven digits, null for missing ones."""
    return [None if v != v else float(f"{v:.7g}") for v in values.tolist()]
