"""Spans of what a run's processes do: what overlaps, what is still open, and how much is kept."""

from pentad.telemetry import timeline as module
from pentad.telemetry.timeline import Timeline, gates_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_overlaps_is_one_span_and_what_is_open_continues_in_the_next_line():
    clock = Clock()
    line = Timeline(clock)
    with line.span("rollout-0", "generates"):
        clock.now += 1
        with line.span("rollout-0", "generates"):
            clock.now += 1
        with line.span("rollout waits", "staleness: batch 3 waits"):
            clock.now += 2
            first = line.take()
            clock.now += 3
    assert first == {
        "from_s": 100.0,
        "spans": [
            ["rollout-0", "generates", 0, 4000],
            ["rollout waits", "staleness: batch 3 waits", 2000, 2000],
        ],
        "num_left_out": 0,
    }
    second = line.take()
    assert second["from_s"] == 104.0 and {row[3] for row in second["spans"]} == {3000}
    assert gates_of(first) == {"staleness": 2000} and line.take()["spans"] == []
    assert gates_of(line.take()) is None


def test_short_pauses_are_joined_and_the_longest_spans_kept(monkeypatch):
    line = Timeline(Clock())
    for number in range(10):
        line.add("rollout waits", f"running groups: {number} must finish", number, number + 0.998)
    (joined,) = line.take()["spans"]
    assert joined == ["rollout waits", "running groups: 9 must finish", 0, 9998]
    monkeypatch.setattr(module, "MAX_SPANS", 2)
    for number in range(4):
        line.add("learner", "train", 10 * number, 10 * number + number + 1)
    found = line.take()
    assert [row[3] for row in found["spans"]] == [3000, 4000] and found["num_left_out"] == 2
