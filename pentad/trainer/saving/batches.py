"""The batches of a run's last steps, a file each: what a replay, or a run that only trains, reads.

`batches/step12.groups` is a line of JSON, then the groups of step 12 (`data.packing`). The
line says what the step was trained with and holds a digest of the rest. A file has its name once it
is whole and on disk, which is before its step is recorded. One that cannot be written is reported
and left out; training continues.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentad.core.errors import Problem, RunError, UserError
from pentad.core.files import write_atomic
from pentad.core.types import Group, Prompt
from pentad.data.packing import pack_groups, unpack_groups

log = logging.getLogger(__name__)

FORMAT = 1
NAME = re.compile(r"step(\d+)\.groups")


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """One step's, as it is kept."""

    step: int
    facts: Mapping[str, Any]
    """What it was trained with: JSON values."""
    groups: list[Group]
    """Their prompts have a gid and nothing else."""


class BatchKeeper:
    """Writes the batches of a run and removes all but the last `num_kept`."""

    def __init__(self, folder: Path, num_kept: int, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.num_kept = num_kept
        self.facts = dict(facts)
        self.num_failed = 0

    def keep(self, step: int, groups: Sequence[Group]) -> None:
        if not self.num_kept:
            return
        try:
            self.write(step, groups)
            self._remove(lambda kept: kept <= step - self.num_kept)
        except (OSError, RunError) as error:
            self.num_failed += 1
            if self.num_failed == 1:
                text = "step %d: its batch is not kept for replay: %s; training continues"
                log.warning(text, step, error)

    def forget(self, after: int) -> None:
        """Those of steps that are done again, and what a killed run left half written."""
        self._remove(lambda kept: kept > after)
        for left in self.folder.glob(".*.aside*"):
            left.unlink(missing_ok=True)

    def write(
        self, step: int, groups: Sequence[Group], more: Mapping[str, Any] | None = None
    ) -> None:
        data = b"".join(pack_groups(groups))
        digest = hashlib.sha256(data).hexdigest()
        facts = {"num_groups": len(groups), **self.facts, **(more or {})}
        head = {"format": FORMAT, "step": step, **facts, "sha256": digest}
        self.folder.mkdir(exist_ok=True)
        place = self.folder / f"step{step}.groups"
        write_atomic(place, (json.dumps(head).encode() + b"\n", data))

    def _remove(self, is_over: Any) -> None:
        for step in kept_steps(self.folder):
            if is_over(step):
                (self.folder / f"step{step}.groups").unlink(missing_ok=True)


def kept_steps(folder: Path) -> list[int]:
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := NAME.fullmatch(name)))


def read_head(folder: Path, step: int) -> dict[str, Any]:
    """What its file says of a batch; UserError where it is none."""
    place = folder / f"step{step}.groups"
    try:
        with place.open("rb") as file:
            head = json.loads(file.readline())
        if head["format"] != FORMAT or head["step"] != step:
            raise ValueError(f"it is of format {head['format']!r} and step {head['step']!r}")
        _ = head["sha256"], head["num_groups"], head["size"]["max_row_tokens"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"is not the batch of step {step} as it was written ({error})"
        raise UserError(Problem(str(place), rule)) from error
    return dict(head)


def read_batch(folder: Path, step: int, digest: str | None = None) -> KeptBatch:
    """UserError for a file that is not there or not what was written; `digest`: of the groups, as
    `read_head` found it."""
    place = folder / f"step{step}.groups"
    try:
        line, _, data = place.read_bytes().partition(b"\n")
        head = json.loads(line)
        found = hashlib.sha256(data).hexdigest()
        if head.pop("sha256") != found or head["step"] != step:
            raise ValueError("its digest does not fit")
        if digest not in (None, found):
            raise ValueError("it has other groups than when the run began")
        if head["format"] != FORMAT:
            raise ValueError(f"its format is {head['format']!r}, not {FORMAT}")
        groups = list(unpack_groups(bytearray(data), lambda gid: Prompt(gid, (), {})))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RunError) as error:
        rule = f"is not the batch of step {step} as it was written ({error})"
        raise UserError(Problem(str(place), rule)) from error
    return KeptBatch(step, head, groups)
