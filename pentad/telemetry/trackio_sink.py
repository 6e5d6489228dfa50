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
    vars(module)["print"] = to_log  # its own lines on the terminal would run through the live table


class TrackioSink:
    """One run there for one run folder, by its name: a resumed run continues in the same curves.
    What was sent cannot be taken back, so it is not sent twice."""

    def __init__(self, folder: Path, name: str, *, project: str, space: str | None) -> None:
        self.run = trackio.init(
            project=project,
            name=name or folder.name,
            space_id=space,
            resume="allow",
            embed=False,  # in a notebook the page would be shown under the table
            auto_log_cpu=False,  # the records have what the run takes
            auto_log_gpu=False,
        )

    def resume(self, step: int) -> None:
        """Never called: `can_redraw` is False."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def write_samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        rows = [{"pick": line["pick"], **cells_of(line)} for line in lines]
        columns = list(rows[0])
        table = trackio.Table(columns=columns, data=[list(row.values()) for row in rows])
        self.run.log({"samples": table}, step=step)

    def close(self) -> None:
        self.run.finish()
