"""Further destinations of records: TensorBoard, Weights & Biases, Trackio. None can stop a run.

Each sink runs in a separate thread. A sink that raises or is too slow is switched off with one
warning; steps.jsonl always has all records.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from pentad.core.errors import Problem, UserError
from pentad.telemetry.section import TrackioConfig, WandbConfig

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Maximum number of records queued for a slow sink."""
MAX_WRITE_S = 120.0
"""Time limit of a single write, or of the sink's start, in seconds."""
CLOSE_S = 10.0
"""Time limit at the end for writing the rest, in seconds."""


class Sink(Protocol):
    """Receives the numbers of a step by path, such as `rl/reward_mean`, and its samples."""

    can_redraw: bool
    """Whether repeated points replace earlier ones; else repeated steps are not sent."""

    def resume(self, step: int) -> None:
        """Called, if it can redraw, before points after `step` are written again."""
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def write_samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes lines of samples.jsonl."""
        ...

    def close(self) -> None: ...


class BackgroundSink:
    """A sink created and called on its own daemon thread."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        *,
        can_redraw: bool = True,
        clock: Callable[[], float] = time.monotonic,
        max_waiting: int = MAX_WAITING,
        max_write_s: float = MAX_WRITE_S,
    ) -> None:
        self.name = name
        self.clock = clock
        self.max_write_s = max_write_s
        self.can_redraw = can_redraw
        """Whether repeated points replace earlier ones."""
        self.is_off = False
        self._make = make
        self._busy_since: float | None = clock()
        self._waiting: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def resume(self, step: int) -> None:
        if self.can_redraw:
            self._put(lambda sink: sink.resume(step))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Queues the values and returns at once."""
        kept = dict(values)
        self._put(lambda sink: sink.write(step, kept))

    def write_samples(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        kept = list(lines)
        self._put(lambda sink: sink.write_samples(step, kept))

    def _put(self, item: Callable[[Sink], None]) -> None:
        if self.is_off:
            return
        since = self._busy_since
        if since is not None and self.clock() - since > self.max_write_s:
            self._switch_off(f"it has not answered for {self.max_write_s:.0f} s")
            return
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self._switch_off(f"it is {self._waiting.maxsize} records behind")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Waits for the sink to finish, at most `timeout_s`."""
        if self.is_off:
            return
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            self._switch_off(f"it did not finish within {timeout_s:.0f} s")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._switch_off(f"it did not finish within {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            sink = self._make()
            while not self.is_off:
                self._busy_since = None
                item = self._waiting.get()
                self._busy_since = self.clock()
                if item is None:
                    sink.close()
                    return
                item(sink)
        except Exception as error:  # an error of a logger must not end the run
            self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, why: str) -> None:
        if not self.is_off:
            self.is_off = True
            log.warning("%s is switched off: %s; training continues", self.name, why)


SINKS = {"tensorboard": "TensorBoardSink", "wandb": "WandbSink", "trackio": "TrackioSink"}
"""Key of `telemetry`, which is also the name of the library and its extra -> class of the sink."""


def build_sinks(
    folder: Path,
    *,
    tensorboard: bool = False,
    wandb: WandbConfig | None = None,
    trackio: TrackioConfig | None = None,
    run_name: str = "",
) -> Sequence[BackgroundSink]:
    """Creates the configured sinks; UserError if a library is missing."""
    sinks = []
    given = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}
    for name, settings in given.items():
        if not settings:
            continue
        more = {} if isinstance(settings, bool) else settings.model_dump()
        try:
            sink = getattr(import_module(f"pentad.telemetry.{name}_sink"), SINKS[name])
        except ImportError as error:
            where = f".project = {more['project']}" if more else " = true"
            rule, remedy = f"{name} is not installed", f"pip install 'pentad[{name}]'"
            raise UserError(Problem(f"telemetry.{name}{where}", rule, remedy)) from error
        make = partial(sink, folder, run_name, **more)
        sinks.append(BackgroundSink(name, make, can_redraw=sink.can_redraw))
    return sinks
