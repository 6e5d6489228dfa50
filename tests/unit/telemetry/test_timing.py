"""Phases exclude each other and sum to the step."""

import pytest

from pentad.telemetry.record import PhaseTimer


@pytest.fixture
def clock():
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    return Clock()


def test_phases_and_the_rest_sum_to_the_wall_clock(clock):
    timer = PhaseTimer(clock)
    clock.now += 1
    with timer.phase("rollout"):
        clock.now += 2
    with timer.phase("train"):
        clock.now += 4
    with timer.phase("rollout"):
        clock.now += 8
    clock.now += 16
    assert timer.phases_ms() == {"rollout": 10_000.0, "train": 4_000.0, "other": 17_000.0}
    assert sum(timer.phases_ms().values()) == 31_000.0


def test_an_inner_phase_stops_the_outer_ones_clock(clock):
    timer = PhaseTimer(clock)
    with timer.phase("train"):
        clock.now += 1
        with timer.phase("publish"):
            clock.now += 10
        clock.now += 2
    assert timer.phases_ms() == {"train": 3_000.0, "publish": 10_000.0, "other": 0.0}


def test_time_in_an_open_phase_is_counted_up_to_now(clock):
    timer = PhaseTimer(clock)
    with timer.phase("train"):
        clock.now += 1
        assert timer.phases_ms() == {"train": 1_000.0, "other": 0.0}
        clock.now += 1
    assert timer.phases_ms()["train"] == 2_000.0


def test_a_phase_that_raises_is_counted(clock):
    timer = PhaseTimer(clock)
    with pytest.raises(KeyError), timer.phase("train"):
        clock.now += 3
        raise KeyError
    assert timer.phases_ms()["train"] == 3_000.0


def test_overlapping_phases_are_refused(clock):
    timer = PhaseTimer(clock)
    one, other = timer.phase("one"), timer.phase("other one")
    one.__enter__()
    other.__enter__()
    with pytest.raises(AssertionError, match="phase one ended while other one was open"):
        one.__exit__(None, None, None)


def test_a_timer_after_another_begins_where_that_one_was_read(clock):
    first = PhaseTimer(clock)
    with first.phase("train"):
        clock.now += 2
    assert first.phases_ms() == {"train": 2000, "other": 0}
    clock.now += 3  # the record of the first is written
    second = PhaseTimer(after=first)
    with second.phase("record"):
        clock.now += 1
    assert second.phases_ms() == {"record": 1000, "other": 3000}
