"""What a run built is left out of collections while it runs, and collected after it."""

import gc

from pentad.core.device import WARM_STEPS, settle, unsettle


def test_the_heap_is_frozen_once_and_given_back():
    gc.unfreeze()
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
