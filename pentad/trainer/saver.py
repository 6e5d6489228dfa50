"""HF exports of a run: when, where, and the one at the end that is always made."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from pentad.core.errors import RunError
from pentad.core.roles import Learner
from pentad.trainer.frequency import Frequency

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Saver:
    """Writes `{root}/epoch{E}epochstep{S}globalstep{G}` folders that transformers loads."""

    learner: Learner
    root: Path
    frequency: Frequency
    steps_per_epoch: int
    last_saved: int = -1

    def folder(self, step: int) -> Path:
        """The folder for the weights after global step `step` (counted from 0)."""
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        return self.root / f"epoch{epoch}epochstep{epoch_step}globalstep{step}"

    def after_step(self, step: int) -> Path | None:
        """Saves if due; `step` is the global step just finished."""
        return self.save(step) if self.frequency.is_due(step + 1) else None

    def save(self, step: int) -> Path:
        folder = self.folder(step)
        if step != self.last_saved:
            try:
                self.learner.save_hf(str(folder))
            except OSError as error:
                raise RunError(f"{folder} could not be saved: {error}") from error
            self.last_saved = step
            log.info("saved %s", folder)
        return folder
