"""Checks that data are unchanged: while a run reads them, and when it resumes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentad.core.errors import Problem, RunError, UserError

if TYPE_CHECKING:  # `plan` reads rows without numpy
    import numpy as np


class Stamp:
    """The state of a file when it was opened. The file must not change during the run, which reads
    rows from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = self._look()

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:  # the open file can still be read
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    @property
    def is_changed(self) -> bool:
        now = self._look()
        return now is not None and now != self.seen

    def check(self) -> None:
        if self.is_changed:
            raise self.refusal()

    def refusal(self) -> RunError:
        return RunError(
            f"{self.path} was changed while the run reads from it: its rows are not those the run "
            "began with; write new data to a new file"
        )


def digest_of_arrays(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.tobytes())
    return digest.hexdigest()


def check_same_data(where: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError if ordinals have other rows than when `saved` was written."""
    changes = [
        f"{name} was {saved.get(name)}, is {new}"
        for name, new in now.items()
        if saved.get(name) != new
    ]
    if changes:
        remedy = (
            "restore the old data and settings, force them with recover.allow=[train_dataset], or "
            "start over with --fresh"
        )
        rule = f"not the data that the run began with: {'; '.join(changes)}"
        raise UserError(Problem(where, rule, remedy))
