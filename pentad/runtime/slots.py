"""Slots: resources of a group's ranks (a GPU, a Ray bundle, a share of the cores), which may be
lost and return.

A lost slot has a file in the run's folder, `slots/N.away`, with the reason: written by the run when
the slot failed too often, or by the user (`pentad slots --drop N`). Without the file the slot is
usable again. `slots/now.json` lists the slots that a run has and uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pentad.core.errors import Problem, UserError
from pentad.core.files import write_atomic

ENDING = ".away"


@dataclass(frozen=True, slots=True)
class GroupNow:
    """The present group of a run."""

    count: int
    """Number of slots at its start."""
    used: tuple[int, ...]
    """Slot of each rank."""
    generation: int
    layout: str


class Slots:
    def __init__(self, folder: Path) -> None:
        """`folder`: `slots/` in the run folder."""
        self.folder = folder

    def away(self) -> dict[int, str]:
        """Returns unusable slots, with the reason."""
        try:
            names = [path for path in self.folder.iterdir() if path.suffix == ENDING]
        except FileNotFoundError:
            return {}
        found = {}
        for path in names:
            if path.stem.isdigit():
                try:
                    found[int(path.stem)] = path.read_text(encoding="utf-8").strip() or "dropped"
                except FileNotFoundError:  # the slot has just returned
                    continue
        return dict(sorted(found.items()))

    def drop(self, slot: int, reason: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / f"{slot}{ENDING}"
        write_atomic(place, f"{reason}\n".encode(), is_durable=False)

    def join(self, slot: int) -> None:
        (self.folder / f"{slot}{ENDING}").unlink(missing_ok=True)

    def write_now(self, now: GroupNow) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        data = json.dumps(asdict(now)).encode()
        write_atomic(self.folder / "now.json", data, is_durable=False)

    def now(self) -> GroupNow:
        """Returns the current group; UserError if no elastic run has written it."""
        path = self.folder / "now.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            return GroupNow(**value | {"used": tuple(value["used"])})
        except (OSError, ValueError, TypeError, KeyError):
            rule = "is no folder of a run with elastic.enabled = true over several ranks"
            remedy = "give the folder of its records, such as runs/logs/USER/EXPERIMENT/TRIAL"
            raise UserError(Problem(f"run folder = {self.folder.parent}", rule, remedy)) from None


def listed(slots: Iterable[int]) -> str:
    """Example: slots 1 and 2."""
    *most, last = [str(slot) for slot in slots]
    return f"slots {', '.join(most)} and {last}" if most else f"slot {last}"


def reasons(away: Mapping[int, str]) -> str:
    return "; ".join(f"slot {slot}: {why}" for slot, why in away.items())
