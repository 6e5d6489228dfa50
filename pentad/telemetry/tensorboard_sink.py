"""TensorBoard event files, written without torch; the only place that imports tensorboard."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

FLUSH_S = 10


class TensorBoardSink:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=points))
        )

    def close(self) -> None:
        self.writer.close()
