"""Compares runs: config keys that differ, and the first step at which their curves differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pentad.view.run import RunView

NAMES = ("experiment_name", "trial_name", "fileroot", "user")
"""Keys that only name a run."""
WATCHED = ("loss", "grad_norm", "lr", "rl/reward_mean", "rl/length_mean")
MISSING = "(no such key)"


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Key -> its value in each config."""
    flat = [dict(_leaves(config, "")) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one if key not in NAMES)
    values = {key: [one.get(key, MISSING) for one in flat] for key in keys}
    return {key: given for key, given in values.items() if any(v != given[0] for v in given)}


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(path, value)]
    parts = [_leaves(item, f"{path}.{key}" if path else str(key)) for key, item in value.items()]
    return [leaf for part in parts for leaf in part]


def first_parting(one: RunView, other: RunView) -> dict[str, Any] | None:
    """The first step at which a number of the training differs; None if there is none so far."""
    steps_one, steps_other = one.steps.columns.of("step"), other.steps.columns.of("step")
    common, rows_one, rows_other = np.intersect1d(steps_one, steps_other, return_indices=True)
    found: list[tuple[float, str, float, float]] = []
    for key in WATCHED:
        left = one.steps.columns.of(key)[rows_one]
        right = other.steps.columns.of(key)[rows_other]
        apart = np.flatnonzero((left != right) & ~(np.isnan(left) & np.isnan(right)))
        if len(apart):
            row = int(apart[0])
            found.append((float(common[row]), key, float(left[row]), float(right[row])))
    if not found:
        return None
    step, key, left_value, right_value = min(found)
    values = [None if v != v else v for v in (left_value, right_value)]
    return {"step": int(step), "key": key, "values": values}
