"""What a run built is left out of collections while it runs, and collected after it."""

import gc

import pytest

from pentad.core.device import RARELY, WARM_STEPS, YOUNG_OBJECTS, freeze_gc, unfreeze_gc


@pytest.fixture(autouse=True)
def unfrozen():
    """The heap of these tests' process is frozen."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def test_the_heap_is_frozen_once_and_given_back():
    freeze_gc(WARM_STEPS - 1)
    assert gc.get_freeze_count() == 0
    freeze_gc(WARM_STEPS)
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    kept = [[number] for number in range(1000)]
    freeze_gc(WARM_STEPS + 1)
    assert gc.get_freeze_count() <= frozen and len(kept) == 1000
    unfreeze_gc()
    assert gc.get_freeze_count() == 0


def test_a_settled_process_collects_seldom_and_one_that_goes_on_as_before():
    before = gc.get_threshold()
    gc.set_threshold(700, 12, 13)
    try:
        freeze_gc(WARM_STEPS)
        freeze_gc(WARM_STEPS)  # of another role in the same process
        assert gc.get_threshold() == (YOUNG_OBJECTS, 12, 13 * RARELY)
        unfreeze_gc()
        assert gc.get_threshold() == (700, 12, 13)
    finally:
        unfreeze_gc()
        gc.set_threshold(*before)


def test_what_was_frozen_before_a_run_stays_so_and_nothing_of_the_run_is_added():
    gc.freeze()
    kept = [[number] for number in range(1000)]
    freeze_gc(WARM_STEPS)
    frozen = gc.get_freeze_count()
    assert frozen > 10_000 and any(one is kept for one in gc.get_objects())
    unfreeze_gc()
    assert gc.get_freeze_count() > 10_000
