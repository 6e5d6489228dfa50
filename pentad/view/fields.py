"""What the fields of a step record mean, by the path a chart asks for, from the record's schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pentad.telemetry.record import BLOCKS, StepRecord


def field_meanings() -> dict[str, dict[str, str]]:
    """`rl/reward_mean` -> its meaning and unit."""
    found = dict(_of_class(StepRecord, ""))
    for block, cls in BLOCKS.items():
        found |= _of_class(cls, f"{block}/")
    return found


def _of_class(cls: Any, prefix: str) -> Iterator[tuple[str, dict[str, str]]]:
    for entry in dataclasses.fields(cls):
        given = entry.metadata
        yield f"{prefix}{entry.name}", {"meaning": given["meaning"], "unit": given["unit"]}
