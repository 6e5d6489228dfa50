"""Trackio; the only place that imports trackio."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio
import trackio.run
import trackio.utils

from pentad.telemetry.samples import cells_of

log = logging.getLogger(__name__)


def to_log(*words: object, **_: object) -> None:
    log.info(" ".join(map(str, words)))


for module in (trackio, trackio.run, trackio.utils):
    vars(module)["print"] = to_log  # its output would disturb the live table


class TrackioSink:
    """One Trackio run for a run folder, by name, so that a resumed run continues its curves. Sent
    values cannot be replaced."""

    can_redraw = False

    def __init__(self, folder: Path, name: str, *, project: str, space: str | None) -> None:
        self.run = trackio.init(
            project=project,
            name=name or folder.name,
            space_id=space,
            resume="allow",
            embed=False,  # in a notebook it would show the page
            auto_log_cpu=False,  # the records contain it
            auto_log_gpu=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def write_samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        rows = [{"pick": line["pick"], **cells_of(line)} for line in lines]
        columns = list(rows[0])
        table = trackio.Table(columns=columns, data=[list(row.values()) for row in rows])
        self.run.log({"samples": table}, step=step)

    def close(self) -> None:
        self.run.finish()
