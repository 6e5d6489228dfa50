"""Weights & Biases; the only place that imports wandb."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from pentad.telemetry.samples import cells_of


class WandbSink:
    """One W&B run for a run folder: its id is derived from the folder's path, so that a resumed run
    continues its curves. The step is a field, because evaluations arrive after wandb's own counter
    has passed. Sent values cannot be replaced.
    """

    can_redraw = False

    def __init__(
        self, folder: Path, name: str, *, project: str, entity: str | None, mode: str
    ) -> None:
        path = str(folder.resolve()).encode()
        self.run = wandb.init(
            project=project,
            entity=entity,
            mode=mode,
            id=hashlib.blake2b(path, digest_size=8).hexdigest(),
            name=name or folder.name,
            dir=str(folder),
            resume="allow",
            # Its output would disturb the live table.
            settings=wandb.Settings(console="off", silent=True),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "step": step})

    def write_samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes one table per step, which the page of the run can browse."""
        rows = [(step, line["pick"], *cells_of(line).values()) for line in lines]
        columns = ["step", "pick", *cells_of(lines[0])]
        table = wandb.Table(columns=columns, data=[list(row) for row in rows])
        self.run.log({"samples": table, "step": step})

    def close(self) -> None:
        self.run.finish()
