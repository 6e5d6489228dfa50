"""What the fields of a step record mean, by the path a chart asks for, from the record's schema."""

from __future__ import annotations

import dataclasses

from pentad.telemetry.record import BLOCKS, StepRecord


def field_meanings() -> dict[str, dict[str, str]]:
    """`rl/reward_mean` -> its meaning and unit."""
    return {
        f"{block}/{entry.name}".lstrip("/"): {k: entry.metadata[k] for k in ("meaning", "unit")}
        for block, cls in {"": StepRecord, **BLOCKS}.items()
        for entry in dataclasses.fields(cls)
    }
