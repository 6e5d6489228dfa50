"""What a run built is left out of collections while it runs, and collected after it."""

import gc

import pytest

from pentad.core.device import WARM_STEPS, YOUNG_OBJECTS, settle, unsettle


@pytest.fixture(autouse=True)
def unfrozen():
    """The heap of these tests' process is frozen."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def test_the_heap_is_frozen_once_and_given_back():
    settle(WARM_STEPS - 1)
    assert gc.get_freeze_count() == 0
    settle(WARM_STEPS)
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    kept = [[number] for number in range(1000)]
    settle(WARM_STEPS + 1)
    assert gc.get_freeze_count() <= frozen and len(kept) == 1000
    unsettle()
    assert gc.get_freeze_count() == 0


def test_a_settled_process_collects_seldom_and_one_that_goes_on_as_before():
    before = gc.get_threshold()
    gc.set_threshold(700, 12, 13)
    try:
        settle(WARM_STEPS)
        settle(WARM_STEPS)  # of another role in the same process
        assert gc.get_threshold() == (YOUNG_OBJECTS, 12, 13)
        unsettle()
        assert gc.get_threshold() == (700, 12, 13)
    finally:
        unsettle()
        gc.set_threshold(*before)


def test_what_was_frozen_before_a_run_stays_so_and_nothing_of_the_run_is_added():
    gc.freeze()
    kept = [[number] for number in range(1000)]
    settle(WARM_STEPS)
    frozen = gc.get_freeze_count()
    assert frozen > 10_000 and any(one is kept for one in gc.get_objects())
    unsettle()
    assert gc.get_freeze_count() > 10_000
