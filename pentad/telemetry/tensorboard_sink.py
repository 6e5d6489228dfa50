"""TensorBoard event files, written without torch; the only place that imports tensorboard."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from pentad.telemetry.samples import cells_of

FLUSH_S = 10


class TensorBoardSink:
    can_redraw = True

    def __init__(self, folder: Path, name: str) -> None:
        events = folder / "tensorboard"
        events.mkdir(parents=True, exist_ok=True)
        self.writer = EventFileWriter(str(events), flush_secs=FLUSH_S)

    def resume(self, step: int) -> None:
        """Makes TensorBoard discard the points after `step`."""
        start = SessionLog(status=SessionLog.START)
        self.writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=points))
        )

    def write_samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes one text per step, for TensorBoard's text tab."""
        content = TextPluginData(version=0).SerializeToString()
        plugin = SummaryMetadata.PluginData(plugin_name="text", content=content)
        text = TensorProto(
            dtype="DT_STRING",
            string_val=["\n\n".join(map(as_markdown, lines)).encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        value = Summary.Value(
            tag="samples", metadata=SummaryMetadata(plugin_data=plugin), tensor=text
        )
        self.writer.add_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))
        )

    def close(self) -> None:
        self.writer.close()


def as_markdown(line: Mapping[str, Any]) -> str:
    """A sample with pick and reward as title; indented, so that its Markdown is not rendered."""
    cells = cells_of(line)
    said = f"{cells['question']}\n\n{cells['answer']}"
    if cells["expected"]:
        said += f"\n\nexpected: {cells['expected']}"
    shown = "\n".join(f"    {row}" for row in said.splitlines())
    parts = f" ({cells['reward_parts']})" if cells["reward_parts"] else ""
    return f"**{line['pick']}, reward {line['reward']}{parts}**\n\n{shown}"
