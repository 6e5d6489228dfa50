"""One run as its files tell it: what it is, how far it is, what happened, and where to look."""

from __future__ import annotations

import datetime
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pentad.core.lock import SILENCE_S
from pentad.telemetry.record import SCHEMA
from pentad.telemetry.runfolder import FORMAT
from pentad.view.groups import GroupReader
from pentad.view.lines import GrowingLines, newest_mtime, parse, read_json
from pentad.view.samples import SampleIndex
from pentad.view.steps import StepIndex

LOG_LINE = re.compile(
    rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} (WARNING|ERROR) +([\w.]+): (.*)", re.DOTALL
)
OF_STEP = re.compile(r"step (\d+): ")
MAX_MARKS = 500
"""The newest of each kind are kept: memory does not grow with a run's troubles."""
BUDGET_S = 0.25
"""How long a request reads on in files that are not indexed yet."""
START = ("time", "from_step", "generation", "config_changes", "hardware")
"""What a page shows of a start."""


class RecordTail:
    """A small file of records, or a log, the newest of them in memory."""

    def __init__(self, path: Path, read: Callable[[bytes], dict[str, Any] | None] = parse) -> None:
        self.file = GrowingLines(path)
        self.read = read
        self.records: deque[dict[str, Any]] = deque(maxlen=10 * MAX_MARKS)

    def advance(self) -> None:
        if self.file.look():
            self.records.clear()
        while lines := self.file.take():
            found = [self.read(line) for _, line in lines]
            self.records += [r for r in found if r is not None and not r.get("superseded")]


def log_mark(line: bytes) -> dict[str, Any] | None:
    """A warning or an error of log.txt."""
    match = LOG_LINE.match(line)
    if match is None:
        return None
    when, level, name, text = (part.decode("utf-8", "replace").strip() for part in match.groups())
    at = datetime.datetime.strptime(when, "%Y-%m-%d %H:%M:%S").timestamp()
    of_step = OF_STEP.match(text)
    kind = "alarm" if of_step and name.endswith("recorder") else level.lower()
    return {"kind": kind, "time": at, "step": int(of_step[1]) if of_step else None, "text": text}


class RunView:
    """The page's side of one run folder. `lock` is held by who reads on in its files."""

    def __init__(self, folder: Path, id: str) -> None:
        self.folder = folder
        self.id = id
        self.lock = threading.Lock()
        self.steps = StepIndex(folder / "steps.jsonl")
        self.samples = SampleIndex(folder / "samples.jsonl")
        self.evals = RecordTail(folder / "evals.jsonl")
        self.recoveries = RecordTail(folder / "recoveries.jsonl")
        self.timeline = GrowingLines(folder / "timeline.jsonl")
        self.log = RecordTail(folder / "log.txt", log_mark)
        self._manifest: tuple[float, dict[str, Any]] = (0.0, {})
        self._groups: GroupReader | None = None

    @property
    def name(self) -> str:
        return "/".join(self.folder.parts[-2:])

    def advance(self, budget_s: float = BUDGET_S) -> None:
        self.steps.advance(budget_s)
        for small in (self.evals, self.recoveries, self.log):
            small.advance()

    @property
    def manifest(self) -> dict[str, Any]:
        place = self.folder / "manifest.json"
        changed_at = newest_mtime(place)
        if changed_at != self._manifest[0]:
            self._manifest = (changed_at, read_json(place) or {})
        return self._manifest[1]

    @property
    def config(self) -> dict[str, Any]:
        found = self.manifest.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def home(self) -> Path:
        """Where the run was last started, from which relative paths of its config count."""
        starts = self.manifest.get("starts") or [{}]
        return Path(str(starts[-1].get("cwd") or "."))

    @property
    def groups(self) -> GroupReader:
        if self._groups is None or self._groups.config is not self.config:
            self._groups = GroupReader(self.folder, self.config, self.home)
        return self._groups

    def state(self) -> str:
        """waiting, running, complete, stopped, failed or interrupted; recipe: it is no run."""
        if is_recipe(self.folder):
            return "recipe"
        place = self.folder / "run.lock"
        try:
            is_held = bool(place.read_text().strip())
        except OSError:
            is_held = False
        if is_held and time.time() - newest_mtime(place) < SILENCE_S:
            return "running"
        end = (read_json(self.folder / "exit.json") or {}).get("end")
        if end in ("complete", "stopped", "failed"):
            return str(end)
        return "interrupted" if self.steps.last or is_held else "waiting"

    def brief(self) -> dict[str, Any]:
        """For a list of runs: nothing is indexed for it."""
        last = self.steps.last or self._last_record()
        return {
            **{"id": self.id, "name": self.name, "path": str(self.folder), "state": self.state()},
            "step": last.get("step") if last else None,
            "time": newest_mtime(self.folder / "steps.jsonl") or newest_mtime(self.folder),
            "reward": ((last or {}).get("rl") or {}).get("reward_mean"),
            "loss": (last or {}).get("loss"),
        }

    def _last_record(self) -> dict[str, Any] | None:
        self.steps.file.look()
        found = self.steps.file.tail(256 << 10) if self.steps.file.size else []
        return found[-1] if found else None

    def summary(self) -> dict[str, Any]:
        """Everything about the run that is no curve."""
        exit_record = read_json(self.folder / "exit.json") or {}
        return {
            **self.brief(),
            "last": self.steps.last,
            "progress": {"steps": self.steps.file.share, "samples": self.samples.file.share},
            "keys": sorted(self.steps.shown.by_path),
            "num_steps": self.steps.shown.num_rows,
            "total_steps": self.config.get("total_train_steps"),
            "eta_s": self.eta_s(),
            "evals": list(self.evals.records),
            "recoveries": list(self.recoveries.records),
            "starts": self.starts(),
            "marks": self.marks(),
            "kept_steps": self.groups.steps(),
            "reason": exit_record.get("reason"),
            "seed": self.manifest.get("seed"),
            "notes": self.notes(),
        }

    def starts(self) -> list[dict[str, Any]]:
        """Each start with what it cost: the time away since the last step before it, the time until
        its first step, and the steps that it did again."""
        found: list[dict[str, Any]] = []
        before: dict[str, float] = {}
        for number, start in enumerate(self.manifest.get("starts") or []):
            own = self.steps.starts.get(start.get("generation") or number, {})
            opened = start.get("opened_s") or _unix(start.get("time"))
            cost = {}
            if number and before and opened:
                cost = {"away_s": opened - before["end"], **_picked(before, "redone", "redone_s")}
            if opened and own:
                cost["until_step_s"] = own["begin"] - opened
            found.append({**_picked(start, *START), "cost": cost})
            before = own or before
        return found

    def eta_s(self) -> float | None:
        """Seconds to the last step, by the median of the latest ones."""
        total, last = self.config.get("total_train_steps"), self.steps.last
        if not isinstance(total, int) or last is None or self.state() != "running":
            return None
        times = self.steps.shown.of("time_s")[-50:]
        gaps = np.diff(times[~np.isnan(times)])
        steps = np.diff(self.steps.shown.of("step")[-50:])
        if len(gaps) != len(steps) or not len(gaps):
            return None
        return float(np.median(gaps / np.maximum(steps, 1)) * max(0, total - last["step"]))

    def marks(self) -> list[dict[str, Any]]:
        """Alarms, warnings, restarts, recoveries and roll-backs, each at a step."""
        found = [dict(mark) for mark in list(self.log.records)[-MAX_MARKS:]]
        for start in self.starts()[1:]:
            at, step = _unix(start.get("time")), start.get("from_step")
            words = f"started again after step {step}"
            found.append({"kind": "restart", "time": at, "step": step, "text": words})
            found[-1]["cost"] = start["cost"]
        for line in self.recoveries.records:
            words = f"learners recovered in {line.get('total_s')} s: {line.get('cause')}"
            found.append({"kind": "recovery", "time": _unix(line.get("time")), "text": words})
        shown = self.steps.shown
        back, skipped = shown.of("rolled_back_to"), shown.of("update_skipped") > 0
        for row in np.flatnonzero(~np.isnan(back) | skipped)[-MAX_MARKS:]:
            step, to = int(shown.of("step")[row]), back[row]
            words = "the update was skipped: loss or gradient not finite, or nothing to train"
            kind, words = ("skipped", words) if to != to else ("rollback", f"back to step {to:.0f}")
            found.append({"kind": kind, "time": None, "step": step, "text": words})
        for mark in found:
            if mark.get("step") is None and mark.get("time") is not None:
                mark["step"] = self.steps.step_at(mark["time"])
        return sorted(found, key=lambda mark: mark.get("step") or 0)

    def notes(self) -> list[str]:
        """What is missing or cannot be read, in sentences."""
        found: list[str] = []
        if is_recipe(self.folder):
            return found
        if not self.folder.is_dir():
            return [f"{self.folder}: there is no such folder (yet); it is looked for every second"]
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
                found.append(f"{name}.jsonl: {lines} are no records and are left out")
        return found


def _picked(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: given.get(name) for name in names}


def _unix(when: Any) -> float | None:
    try:
        return datetime.datetime.fromisoformat(str(when)).timestamp()
    except ValueError:
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
