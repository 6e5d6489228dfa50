"""Whether a data file is still the one that a run began to read."""

from __future__ import annotations

from pathlib import Path

from pentad.core.errors import RunError


class Stamp:
    """A file as it was opened. A run reads rows from it until its end, so it must stay the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = self._look()

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:  # what was opened can still be read
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
