"""Where the checkpoints of a trial lie: names that rules, conversions and checkpoints share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pentad.core.errors import Problem

INFO, STATE = "recover_info", "recover_checkpoint"


def step_of(name: str) -> int | None:
    """The step in "globalstep12"; None for any other name."""
    found = re.fullmatch(r"globalstep(0|[1-9][0-9]{0,17})", name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class RecoveryPath:
    """What a path says of a recovery checkpoint."""

    root: Path
    """Of the trial."""
    step: int | None = None
    role: str | None = None


def recovery_path(path: Path) -> RecoveryPath | None:
    """For a trial's root, `recover_info`, `ROLE/recover_checkpoint` and the folder of one step in
    them; None for any other path."""
    path = path.absolute()
    if (path / INFO).is_dir():
        return RecoveryPath(path)
    step = step_of(path.name)
    parent = path if step is None else path.parent
    if parent.name == INFO:
        return RecoveryPath(parent.parent, step)
    if parent.name == STATE:
        return RecoveryPath(parent.parents[1], step, parent.parent.name)
    return None


def recovery_problem(where: str, path: Path) -> Problem | None:
    """The sentence for a recovery checkpoint in the place of a model."""
    if not path.is_dir() or recovery_path(path) is None:
        return None
    rule = "is a recovery checkpoint of a run, not a model"
    return Problem(where, rule, f"make a HF folder of it: pentad convert {path} HF_FOLDER")
