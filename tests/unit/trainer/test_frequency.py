"""Periodic triggers: steps, epochs, seconds, any of them."""

from pentad.trainer.saving.periodic import Frequency


def due_steps(frequency, steps):
    return [step for step in steps if frequency.is_due(step)]


def test_never_without_triggers():
    assert due_steps(Frequency(), range(1, 50)) == []


def test_steps_and_epochs_both_trigger():
    frequency = Frequency(steps=4, epochs=1, steps_per_epoch=6)
    assert due_steps(frequency, range(1, 13)) == [4, 6, 8, 12]


def test_seconds_count_from_the_last_trigger():
    now = [0.0]
    frequency = Frequency(seconds=10, clock=lambda: now[0])
    assert not frequency.is_due(1)
    now[0] = 9.9
    assert not frequency.is_due(2)
    now[0] = 10.0
    assert frequency.is_due(3)
    now[0] = 19.0
    assert not frequency.is_due(4)
    now[0] = 20.0
    assert frequency.is_due(5)
