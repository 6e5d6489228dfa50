"""One run, read from its files: config, progress, events and records."""

from __future__ import annotations

import datetime
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pentad.core.lock import SILENCE_S
from pentad.telemetry.record import SCHEMA
from pentad.telemetry.runfolder import FORMAT
from pentad.view.groups import GroupReader
from pentad.view.lines import (
    GrowingLines,
    dicts,
    newest_mtime,
    number,
    parse,
    part,
    read_bytes,
    read_json,
)
from pentad.view.samples import SampleIndex
from pentad.view.steps import StepIndex

LOG_LINE = re.compile(
    rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} (WARNING|ERROR) +([\w.]+): (.*)", re.DOTALL
)
OF_STEP = re.compile(r"step (\d+): ")
MAX_MARKS = 500
"""Maximum number of newest events kept of each kind, to bound memory."""
BUDGET_S = 0.2
"""Time limit for a request to read files that are not indexed yet."""
START = ("time", "from_step", "generation", "config_changes", "hardware")
"""Fields of a start that the page shows."""


class RecordTail(GrowingLines):
    """A small file of records; the newest are kept in memory."""

    def clear(self) -> None:
        self.records: deque[dict[str, Any]] = deque(maxlen=10 * MAX_MARKS)

    def add(self, offset: int, line: bytes) -> None:
        record = parse(line)
        if record is not None and not record.get("superseded"):
            self.records.append(record)


class LogTail(RecordTail):
    """Warnings and errors of log.txt."""

    def add(self, offset: int, line: bytes) -> None:
        mark = log_mark(line)
        if mark is not None:
            self.records.append(mark)


def log_mark(line: bytes) -> dict[str, Any] | None:
    """Parses a warning or an error of log.txt; None for other lines."""
    match = LOG_LINE.match(line)
    if match is None:
        return None
    when, level, name, text = (part.decode("utf-8", "replace").strip() for part in match.groups())
    of_step = OF_STEP.match(text)
    kind = "alarm" if of_step and name.endswith("recorder") else level.lower()
    return _mark(kind, text, int(of_step[1]) if of_step else None, when)


def _mark(kind: str, text: str, step: float | None, when: Any = None) -> dict[str, Any]:
    return {"kind": kind, "text": text, "step": step, "time": _unix(when)}


class RunView:
    """One run folder. The thread that reads its files holds `lock`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.id = name.replace("/", "~")
        self.lock = threading.Lock()
        self.steps = StepIndex(folder / "steps.jsonl")
        self.samples = SampleIndex(folder / "samples.jsonl")
        self.evals = RecordTail(folder / "evals.jsonl")
        self.recoveries = RecordTail(folder / "recoveries.jsonl")
        self.timeline = GrowingLines(folder / "timeline.jsonl")
        self.log = LogTail(folder / "log.txt")
        self._manifest: tuple[float, dict[str, Any]] = (0.0, {})
        self._groups: GroupReader | None = None

    def advance(self, budget_s: float = BUDGET_S) -> None:
        self.steps.advance(budget_s)
        for small in (self.evals, self.recoveries, self.log):
            small.advance()

    @property
    def manifest(self) -> dict[str, Any]:
        place = self.folder / "manifest.json"
        changed_at = newest_mtime(place)
        if changed_at != self._manifest[0]:
            self._manifest = (changed_at, read_json(place))
        return self._manifest[1]

    @property
    def config(self) -> dict[str, Any]:
        found = self.manifest.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def last_start(self) -> dict[str, Any]:
        return (dicts(self.manifest.get("starts")) or [{}])[-1]

    @property
    def home(self) -> Path:
        """The folder of the run's last start, the base of its config's relative paths."""
        return Path(str(self.last_start.get("cwd") or "."))

    @property
    def total_steps(self) -> float | None:
        """Total steps of the run, as counted at its last start."""
        given = self.config.get("total_train_steps")
        return number(self.last_start.get("num_steps")) or number(given)

    @property
    def groups(self) -> GroupReader:
        if self._groups is None or self._groups.config is not self.config:
            self._groups = GroupReader(self.folder, self.config, self.home)
        return self._groups

    def state(self) -> str:
        """waiting, running, complete, stopped, failed or interrupted; recipe: not a run."""
        if is_recipe(self.folder):
            return "recipe"
        place = self.folder / "run.lock"
        is_held = bool(read_bytes(place).strip())
        if is_held and time.time() - newest_mtime(place) < SILENCE_S:
            return "running"
        end = read_json(self.folder / "exit.json").get("end")
        if end in ("complete", "stopped", "failed"):
            return str(end)
        return "interrupted" if self.steps.size or is_held else "waiting"

    def brief(self) -> dict[str, Any]:
        """Summary for a list of runs, without indexing."""
        self.steps.look()
        tail = self.steps.tail(256 << 10) if self.steps.size and not self.steps.last else []
        last = self.steps.last or (tail[-1] if tail else {})
        return {
            **{"id": self.id, "name": self.name, "path": str(self.folder), "state": self.state()},
            **{"step": number(last.get("step")), "loss": number(last.get("loss"))},
            "reward": number(part(last, "rl", "reward_mean")),
            "time": newest_mtime(self.folder / "steps.jsonl") or newest_mtime(self.folder),
        }

    def sign(self) -> str:
        """A text that changes when there is something new to show."""
        files = (self.steps, self.evals, self.recoveries, self.log)
        manifest, steps = newest_mtime(self.folder / "manifest.json"), self.steps.shown.num_rows
        return f"{[file.position for file in files]} {manifest} {steps} {self.state()}"

    def summary(self) -> dict[str, Any]:
        """All data of a run except curves."""
        return {
            **{"sign": self.sign(), **self.brief()},
            **{"last": self.steps.last, "progress": self.steps.share},
            "keys": sorted(self.steps.shown.by_path),
            "total_steps": self.total_steps,
            "eta_s": self.eta_s(),
            "evals": list(self.evals.records),
            "recoveries": list(self.recoveries.records),
            "starts": self.starts(),
            "marks": self.marks(),
            "reason": read_json(self.folder / "exit.json").get("reason"),
            "notes": self.notes(),
        }

    def starts(self) -> list[dict[str, Any]]:
        """Each start with its cost: the time since the last step before it, the time until its
        first step, and the repeated steps."""
        found: list[dict[str, Any]] = []
        before: dict[str, float] = {}
        for place, start in enumerate(dicts(self.manifest.get("starts"))):
            own = self.steps.starts.get(int(number(start.get("generation")) or place), {})
            opened = number(start.get("opened_s")) or _unix(start.get("time"))
            cost = {}
            if place and before and opened:
                cost = {"away_s": opened - before["end"]}
                cost |= {name: before[name] for name in ("redone", "redone_s")}
            if opened and own:
                cost["until_step_s"] = own["begin"] - opened
            found.append({**{name: start.get(name) for name in START}, "cost": cost})
            before = own or before
        return found

    def eta_s(self) -> float | None:
        """Estimated seconds to the last step, from the median of the latest steps."""
        total, last = self.total_steps, self.steps.last
        if total is None or last is None or self.state() != "running":
            return None
        times, steps = (np.diff(self.steps.shown.of(name)[-50:]) for name in ("time_s", "step"))
        rates = times / np.maximum(steps, 1)
        known = rates[rates > 0]
        return float(np.median(known)) * max(0, total - last["step"]) if len(known) else None

    def marks(self) -> list[dict[str, Any]]:
        """Alarms, warnings, restarts, recoveries and roll-backs, each at a step."""
        found = list(self.log.records)[-MAX_MARKS:]
        for start in self.starts()[1:]:
            step = number(start["from_step"])
            words = f"started again after step {step}"
            found.append(_mark("restart", words, step, start["time"]) | {"cost": start["cost"]})
        for line in self.recoveries.records:
            words = f"learners recovered in {line.get('total_s')} s: {line.get('cause')}"
            found.append(_mark("recovery", words, None, line.get("time")))
        shown = self.steps.shown
        back, skipped = shown.of("rolled_back_to"), shown.of("update_skipped") > 0
        for row in np.flatnonzero(~np.isnan(back) | skipped)[-MAX_MARKS:]:
            words = "the update was skipped: loss or gradient not finite, or nothing to train"
            kind = "skipped" if np.isnan(back[row]) else "rollback"
            words = words if kind == "skipped" else f"back to step {back[row]:.0f}"
            found.append(_mark(kind, words, int(shown.of("step")[row])))
        known = [mark | {"step": self._step_of(mark)} for mark in found]
        return sorted(known, key=lambda mark: mark["step"] or 0)

    def _step_of(self, mark: Mapping[str, Any]) -> float | None:
        is_known = mark["step"] is not None or mark["time"] is None
        return mark["step"] if is_known else self.steps.step_at(mark["time"])

    def notes(self) -> list[str]:
        """Messages on missing or unreadable files."""
        found: list[str] = []
        if is_recipe(self.folder):
            return found
        if not self.folder.is_dir():
            return [f"{self.folder}: there is no such folder (yet); it is checked every second"]
        written = self.manifest.get("format")
        if not self.manifest:
            found.append("manifest.json: missing or being written, so the config is not known")
        elif written != FORMAT:
            found.append(f"manifest.json: its format is {written}, this version reads {FORMAT}")
        if not self.steps.shown.num_rows:
            found.append("steps.jsonl: no step is recorded yet")
        if self.steps.other_schemas:
            others = ", ".join(sorted(self.steps.other_schemas))
            found.append(
                f"steps.jsonl: has records of schema {others}, this version reads {SCHEMA}; fields "
                "of other names are not shown"
            )
        for name, index in (("steps", self.steps), ("samples", self.samples)):
            if index.num_unreadable:
                lines = f"{index.num_unreadable} lines"
                found.append(f"{name}.jsonl: {lines} are not records and are left out")
        return found


def _unix(when: Any) -> float | None:
    try:
        return datetime.datetime.fromisoformat(str(when)).timestamp()
    except (ValueError, OverflowError):
        return None


def is_recipe(place: Path) -> bool:
    return place.suffix in (".yaml", ".yml") and place.is_file()


def find_runs(places: list[Path], depth: int = 5) -> list[Path]:
    """Folders of runs at or under these places, the newest first."""
    found: dict[Path, float] = {}
    for place in places:
        for at, folders, names in os.walk(place):
            folder = Path(at)
            is_run = "manifest.json" in names or "steps.jsonl" in names
            if is_run:
                changed_at = newest_mtime(folder / "steps.jsonl")
                found[folder] = changed_at or newest_mtime(folder / "manifest.json")
            is_end = is_run or len(folder.relative_to(place).parts) >= depth
            others = () if is_end else (n for n in folders if n not in ("checkpoints", "earlier"))
            folders[:] = others
    return sorted(found, key=lambda folder: -found[folder])
