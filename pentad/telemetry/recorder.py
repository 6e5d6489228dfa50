"""The recorder: writes the records of a run to files, sinks and screen.

It stops a run only if the run folder no longer exists. Other failures (full disk, closed terminal,
bug in a logger) are reported once and counted, and training continues; files are tried again at the
next step. Steps and evaluations may be reported from different threads.

`resume` continues the records of an earlier start: those beyond the restored step are marked as
superseded, all others count as if recorded by this start.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pentad.telemetry.record import StepRecord, plain_json, scalars
from pentad.telemetry.runfolder import RunFolder
from pentad.telemetry.samples import pick_samples
from pentad.telemetry.screen import Screen
from pentad.telemetry.sinks import BackgroundSink
from pentad.telemetry.steps import LineWriter, read_lines, reading_records, supersede
from pentad.telemetry.timeline import gates_of, timeline

if TYPE_CHECKING:
    from pentad.core.types import Group

log = logging.getLogger(__name__)

RECORDS_KEPT = 50
"""Number of latest records that are searched for alarms; an alarm is repeated after as many
steps."""

FindAlarms = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], list[str]]
"""(fields of the latest records, fields of the first record) -> messages."""


def signs_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record that alarms read."""
    return {"loss": record["loss"], **record["rl"]}


def note_effective(record: Mapping[str, Any], effective: dict[int, float]) -> None:
    """Adds the duration of a step to `effective`, unless its update was skipped."""
    if not record["update_skipped"]:
        effective[record["step"]] = (record["wall_clock_ms"] or 0.0) / 1e3
    back = record.get("rolled_back_to")
    for step in [step for step in effective if back is not None and step > back]:
        del effective[step]


LISTENERS: list[Callable[[dict[str, Any]], object]] = []
"""Functions of this process that are called with the record of every step; one that raises is
reported and does not stop the run."""


@contextmanager
def listening(on_step: Callable[[dict[str, Any]], object] | None) -> Iterator[None]:
    if on_step is None:
        yield
        return
    LISTENERS.append(on_step)
    try:
        yield
    finally:
        LISTENERS.remove(on_step)


class Recorder:
    def __init__(
        self,
        folder: RunFolder,
        screen: Screen | None = None,
        sinks: Sequence[BackgroundSink] = (),
        *,
        samples_per_step: int = 4,
        seed: int = 0,
        answer_keys: Mapping[str, str] | None = None,
        find_alarms: FindAlarms | None = None,
    ) -> None:
        self.folder = folder
        self.screen = screen
        self.sinks = sinks
        self.samples_per_step = samples_per_step
        self.seed = seed
        self.answer_keys = answer_keys or {}
        self.find_alarms = find_alarms
        self.failures: dict[str, int] = {}
        """Kind of write failure -> count."""
        self.generation = len(folder.manifest["starts"])
        self.opened_s = time.time()
        """Unix time at which this start began."""
        starts = folder.manifest["starts"] or [{"opened_s": self.opened_s}]
        self.first_opened_s: float | None = starts[0].get("opened_s")
        self._effective: dict[int, float] = {}
        """Step -> seconds, for steps that changed the weights and were not undone."""
        self._open_files()
        self._new_evals: list[dict[str, Any]] = []
        self._first: Mapping[str, Any] | None = None
        self._recent: list[Mapping[str, Any]] = []
        self._alarmed: dict[str, int] = {}
        self._drawn: dict[str, set[int]] = {"steps": set(), "evals": set()}
        """Superseded lines, which sinks that cannot redraw already have."""
        self._lock = threading.Lock()

    def _open_files(self) -> None:
        names = ("steps.jsonl", "samples.jsonl", "evals.jsonl", "timeline.jsonl")
        self._writers = [LineWriter(self.folder.file(name)) for name in names]
        self._steps, self._samples, self._evals, self._timeline = self._writers

    def resume(self, step: int) -> int:
        """Continues after `step`; returns the number of recorded steps that will be repeated. Call
        it once."""
        with self._lock:
            for writer in self._writers:
                writer.close()
            supersede(self.folder.file("samples.jsonl"), after=step)
            supersede(self.folder.file("timeline.jsonl"), after=step)
            self._drawn["evals"] = supersede(
                self.folder.file("evals.jsonl"), after=step, key="version"
            )
            redone = supersede(self.folder.file("steps.jsonl"), after=step)
            self._drawn["steps"] = redone
            self._open_files()
            records = read_lines(self.folder.file("steps.jsonl"))
            evals = read_lines(self.folder.file("evals.jsonl"))
            with reading_records(self.folder.file("steps.jsonl")):
                self._remember(records, evals)
            if self.generation:
                for sink in self.sinks:
                    sink.resume(step)
            self._show(lambda screen: screen.resume(records, evals))
            return len(redone)

    def _remember(self, records: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> None:
        known = [e["version"] for record in records for e in record.get("evals") or ()]
        self._new_evals = [line for line in evals if line["version"] not in known]
        self._effective = {}
        for record in records:
            note_effective(record, self._effective)
        if records:
            self._first = signs_of(records[0])
            self._recent = [signs_of(record) for record in records[-RECORDS_KEPT:]]

    def evaluated(self) -> set[int]:
        """The weight versions in evals.jsonl."""
        return {line["version"] for line in self.evaluations()}

    def evaluations(self) -> list[dict[str, Any]]:
        return read_lines(self.folder.file("evals.jsonl"))

    def state(self) -> dict[str, Any]:
        """State that is not in the files, as JSON values."""
        with self._lock:
            return {"alarmed": dict(self._alarmed)}

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._alarmed = {kind: int(step) for kind, step in state["alarmed"].items()}

    def sync(self) -> None:
        """Flushes all records to disk."""
        with self._lock:
            for writer in self._writers:
                self._try(writer.path.name, writer.sync)

    def step(self, record: StepRecord, groups: Sequence[Group] = ()) -> dict[str, Any]:
        """Records one step and some samples of its groups; returns the record as written."""
        with self._lock:
            line = record.as_json() | {"generation": self.generation}
            note_effective(line, self._effective)
            if self.first_opened_s is not None and record.time_s is not None:
                passed = record.time_s - self.first_opened_s
                line["infra"]["ettr"] = (
                    sum(self._effective.values()) / passed if passed > 0 else None
                )
            spans = {"step": record.step, "generation": self.generation, **timeline.take()}
            self._try("timeline.jsonl", lambda: self._timeline.append(spans))
            line["evals"], line["gates"] = self._new_evals or None, gates_of(spans)
            self._new_evals = []
            self._try("steps.jsonl", lambda: self._steps.append(line))
            picks: list[dict[str, Any]] = []
            self._try(
                "samples.jsonl", lambda: picks.extend(self._write_samples(record.step, groups))
            )
            values = scalars(line)
            for sink in self._takers("steps", record.step):
                sink.write(record.step, values)
                if picks:
                    sink.write_samples(record.step, picks)
            self._show(lambda screen: screen.samples(picks))
            self._show(lambda screen: screen.step(line))
            self._try("alarms", lambda: self._raise_alarms(line))
            for listener in LISTENERS:
                self._try("on_step", partial(listener, line))
            self.folder.check_there()
            return line

    def progress(self, text: str) -> None:
        """Shows the work in progress; it is not recorded."""
        with self._lock:
            self._show(lambda screen: screen.progress(text))

    def evaluation(self, result: Mapping[str, Any]) -> None:
        """Records one evaluation; `result` has at least `version`."""
        with self._lock:
            line = plain_json(result)
            self._new_evals.append(line)
            self._try("evals.jsonl", lambda: self._evals.append(line))
            values = {f"eval/{path}": value for path, value in scalars(line).items()}
            for sink in self._takers("evals", int(result["version"])):
                sink.write(int(result["version"]), values)
            self._show(lambda screen: screen.evaluation(line))

    def close(self) -> None:
        with self._lock:
            self._show(lambda screen: screen.close())
            for sink in self.sinks:
                sink.close()
            for writer in self._writers:
                writer.close()
            for what, count in self.failures.items():
                log.warning("%s failed %d times in this run", what, count)

    def _takers(self, kind: str, step: int) -> list[BackgroundSink]:
        return [s for s in self.sinks if s.can_redraw or step not in self._drawn[kind]]

    def _write_samples(self, step: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
        picks = pick_samples(
            groups, self.samples_per_step, step=step, seed=self.seed, answer_keys=self.answer_keys
        )
        lines = [plain_json(pick) for pick in picks]
        for line in lines:
            self._samples.append(line)
        return lines

    def _raise_alarms(self, line: Mapping[str, Any]) -> None:
        if self.find_alarms is None:
            return
        self._first = self._first or signs_of(line)
        self._recent = [*self._recent, signs_of(line)][-RECORDS_KEPT:]
        for sentence in self.find_alarms(self._recent, self._first):
            kind = re.sub(r"[0-9.]+", "", sentence)
            if line["step"] - self._alarmed.get(kind, -RECORDS_KEPT) >= RECORDS_KEPT:
                self._alarmed[kind] = line["step"]
                log.warning("step %d: %s", line["step"], sentence)

    def _show(self, act: Callable[[Screen], None]) -> None:
        """Draws on the screen; a screen that failed is not used again."""
        screen = self.screen
        if screen is None:
            return
        if not self._try("the screen", lambda: act(screen)):
            self.screen = None

    def _try(self, what: str, act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception as error:  # the run continues after any failure
            self.failures[what] = self.failures.get(what, 0) + 1
            if self.failures[what] == 1:
                log.warning("%s: %s: %s; training continues", what, type(error).__name__, error)
            return False
        return True
