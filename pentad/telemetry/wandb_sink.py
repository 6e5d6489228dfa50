"""Weights & Biases; the only place that imports wandb."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import wandb

from pentad.telemetry.sinks import WandbSettings


class WandbSink:
    """One run there for one run folder: its id follows from the folder's path. Steps are a field,
    since evaluations come at steps that wandb's own counter has passed.
    """

    def __init__(self, settings: WandbSettings, folder: Path, name: str) -> None:
        path = str(folder.resolve()).encode()
        self.run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            id=hashlib.blake2b(path, digest_size=8).hexdigest(),
            name=name or folder.name,
            dir=str(folder),
            resume="allow",
            # Its own lines on the terminal would run through the live table.
            settings=wandb.Settings(console="off", silent=True),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({**values, "step": step})

    def close(self) -> None:
        self.run.finish()
