"""The timeline of a run's processes as spans of work and waits, written to timeline.jsonl.

The scheduler's process adds a span for each call to another process and each wait; the recorder
writes the spans with every step. A span costs microseconds, and the size of a line is bounded.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MAX_SPANS = 1000
"""Maximum number of spans in one line of the file: the longest are kept."""
JOIN_S = 0.005
"""Spans with equal texts (except numbers) and a shorter gap are joined."""
GATES = "rollout waits"
"""The lane of gates that blocked new prompts."""

LINE: Mapping[str, str] = {
    "step": "the step whose record was written with this line",
    "generation": "number of earlier starts of the run",
    "from_s": "when the first span began, Unix time",
    "spans": "work and waits since the previous line, each as [lane, words, begin, duration]: "
    "begin in ms after from_s, duration in ms; an open span continues in the next line",
    "num_left_out": f"number of spans left out, the shortest, of a step with more than {MAX_SPANS}",
}
LANES: Mapping[str, str] = {
    "learner": "the phases of the step, as in `phases` of its record; nested phases overlap",
    "rank N": "a rank of a learner of several processes: each call, with the time that the rank "
    "waited for others drawn at its end (the real position within the call is not known)",
    "a sampler's name": "while it has requests",
    "a scorer's role": "while it scores",
    "rewards": "while samples are scored",
    "publish, evaluation": "from start to end, with the version of the weights",
    "rollout waits": "the gate that blocked new prompts: `staleness` (newer weights are not "
    "published yet), `running groups` (on-policy: those of the batch must finish first), "
    "`max_concurrent_groups`, `slots` or `end of the run`",
    "train waits, score waits": "groups that are not sampled or scored yet",
}


@dataclass(slots=True)
class TimedSpan:
    lane: str
    what: str
    begin: float
    end: float
    num_open: int = 1
    """Number of unfinished overlapping spans with the same text, which are one span."""


class Timeline:
    """Collects spans until `take`. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._done: deque[TimedSpan] = deque(maxlen=16 * MAX_SPANS)
        self._open: dict[tuple[str, str], TimedSpan] = {}

    @contextmanager
    def span(self, lane: str, what: str) -> Iterator[None]:
        key = lane, what
        with self._lock:
            if key in self._open:
                self._open[key].num_open += 1
            else:
                self._open[key] = TimedSpan(lane, what, self.clock(), 0.0)
        try:
            yield
        finally:
            with self._lock:
                span = self._open[key]
                span.num_open -= 1
                if not span.num_open:
                    span.end = self.clock()
                    self._done.append(self._open.pop(key))

    def add(self, lane: str, what: str, begin: float, end: float) -> None:
        with self._lock:
            self._done.append(TimedSpan(lane, what, begin, end))

    def take(self) -> dict[str, Any]:
        """Returns the fields of a line, without the step, and clears spans; open ones are split."""
        with self._lock:
            now, spans = self.clock(), list(self._done)
            self._done.clear()
            for span in self._open.values():
                spans.append(TimedSpan(span.lane, span.what, span.begin, now))
                span.begin = now
        joined = sorted(_joined(spans), key=lambda span: span.begin - span.end)
        kept = sorted(joined[:MAX_SPANS], key=lambda span: span.begin)
        start = kept[0].begin if kept else now
        rows = [[s.lane, s.what, *_ms(s.begin - start, s.end - s.begin)] for s in kept]
        left_out = len(joined) - len(kept)
        return {"from_s": round(start, 3), "spans": rows, "num_left_out": left_out}


def _joined(spans: Sequence[TimedSpan]) -> list[TimedSpan]:
    found: list[TimedSpan] = []
    last: dict[tuple[str, str], TimedSpan] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        key = span.lane, re.sub(r"\d+", "", span.what)
        before = last.get(key)
        if before is not None and span.begin - before.end < JOIN_S:
            before.end, before.what = max(before.end, span.end), span.what
        else:
            last[key] = span
            found.append(span)
    return [span for span in found if span.end - span.begin >= 0.001]


def _ms(*seconds: float) -> list[int]:
    return [round(1e3 * one) for one in seconds]


def gate_of(what: str) -> str:
    """The name of a gate, from the text of its span."""
    return what.partition(":")[0]


def gates_of(line: Mapping[str, Any]) -> dict[str, float] | None:
    """Gate -> milliseconds for which it was closed."""
    found: dict[str, float] = {}
    for lane, what, _, length in line["spans"]:
        if lane == GATES:
            found[gate_of(what)] = found.get(gate_of(what), 0.0) + length
    return found or None


timeline = Timeline()
"""The timeline of this process."""
