"""The garbage collector of a process that trains or samples for hours."""

from __future__ import annotations

import atexit
import gc

WARM_STEPS = 2
"""Steps after which a process holds what it will hold: models, compiled code, captured graphs."""


def settle(num_steps: int) -> None:
    """Called after every step: when the warm ones are over, what was built so far is kept out of
    further collections. A full collection walks every object of the process, about half a second
    with torch's compiler loaded, and begins in the middle of whatever step it likes."""
    if num_steps == WARM_STEPS:
        gc.collect()
        gc.freeze()
        atexit.register(unsettle)  # or what frees itself at the end is reported as leaked


def unsettle() -> None:
    """At the end of a run, for a process that goes on: what it held can be collected again."""
    gc.unfreeze()
