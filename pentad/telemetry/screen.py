"""The screen of a run: a live table on a terminal, plain aligned lines elsewhere.

It shows only records of steps.jsonl, evals.jsonl and samples.jsonl, so that running, finished and
crashed runs look the same. Readable at 80 columns.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pentad.core.errors import one_line
from pentad.telemetry.samples import transcript_of

Record = Mapping[str, Any]

ROWS_SHOWN = 8
SPARK_WIDTH = 40
SAMPLE_WIDTH = 74
SAMPLE_LINES = 3
"""Lines of a sample: one for the question, two for the answer."""
MAX_TURNS = 5
"""Maximum lines of a conversation."""
HEADER_EVERY = 25
"""Number of plain lines between two headers."""
ETA_STEPS = 20
"""Number of steps whose mean duration is the base of the estimated end."""
BLOCKS = "".join(chr(0x2581 + i) for i in range(8))
ASCII_BLOCKS = "_.-=+*#@"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: header, path in the record, width, and format."""

    title: str
    path: str
    width: int
    write: Callable[[float], str]


def number(value: float) -> str:
    """At most six characters: 0.531, 12.3, 4.1e-05, 184k."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.0f}k"
    if size >= 100:
        return f"{value:.0f}"
    if size >= 1e-3 or value == 0:
        return f"{value:.3g}" if size >= 10 else f"{value:.3f}"
    return f"{value:.0e}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def seconds(value_ms: float) -> str:
    return f"{value_ms / 1e3:.2f}" if value_ms < 1e5 else f"{value_ms / 1e3:.0f}"


COLUMNS = (
    Column("reward", "rl.reward_mean", 6, number),
    Column("std", "rl.reward_std", 5, number),
    Column("loss", "loss", 6, number),
    Column("acc%", "preference.accuracy", 5, percent),
    Column("margin", "preference.margin", 6, number),
    Column("kl", "preference.divergence", 5, number),
    Column("len", "rl.length_mean", 5, number),
    Column("cut%", "rl.truncated_share", 5, percent),
    Column("ent", "rl.entropy", 5, number),
    Column("kl", "rl.kl_ref", 5, number),
    Column("clip%", "rl.clip_fraction", 5, percent),
    Column("mismatch", "rl.logprob_diff_mean", 8, number),
    Column("gnorm", "grad_norm", 5, number),
    Column("tok/s", "tokens_per_sec", 5, number),
    Column("sec", "wall_clock_ms", 5, seconds),
)
RL_LEAVES_OUT = {"loss", "rl.truncated_share"}
"""Columns that RL runs leave out at 80 columns: the loss of a policy gradient carries no
information by itself."""


def columns_for(records: Sequence[Record]) -> list[Column]:
    """The columns that have a value in any record."""
    has_rl = any(look_up(record, "rl.reward_mean") is not None for record in records)
    columns = [c for c in COLUMNS if not (has_rl and c.path in RL_LEAVES_OUT)]
    return [c for c in columns if any(look_up(r, c.path) is not None for r in records)]


def look_up(record: Record, path: str) -> float | None:
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


class Screen:
    """What a screen shows; `draw` renders it. The subclasses write it to a stream."""

    def __init__(self, title: str, total_steps: int) -> None:
        self.title = title
        self.total_steps = total_steps
        self.records: list[Record] = []
        self.evals: list[Record] = []
        self.rewards: list[float] = []
        self.losses: list[float] = []
        self.best: Record | None = None
        self.worst: Record | None = None
        self.under_way = ""
        """Description of the step in progress."""

    def resume(self, records: Sequence[Record], evals: Sequence[Record]) -> None:
        """Shows records of an earlier start, without superseded ones."""
        for record in records:
            self._add(record)
        self.evals.extend(evals)
        self.refresh()

    def step(self, record: Record) -> None:
        self.under_way = ""
        self._add(record)
        self.refresh()

    def _add(self, record: Record) -> None:
        self.records.append(record)
        for values, path in ((self.rewards, "rl.reward_mean"), (self.losses, "loss")):
            value = look_up(record, path)
            if value is not None:
                values.append(value)

    def evaluation(self, record: Record) -> None:
        self.evals.append(record)
        self.refresh()

    def samples(self, lines: Sequence[Record]) -> None:
        for line in lines:
            if line["pick"] == "best":
                self.best = line
            elif line["pick"] == "worst":
                self.worst = line

    def progress(self, text: str) -> None:
        """Shows the work in progress, if the screen can erase it."""
        self.under_way = text
        self.refresh()

    def close(self) -> None:
        self.under_way = ""
        self.refresh()

    def refresh(self) -> None:
        """Called after every change: draws it, if the screen can erase."""

    @property
    def curve(self) -> tuple[str, str, list[float]]:
        """Name, path and values of the main curve: the reward, or else the loss."""
        if self.rewards:
            return "reward", "rl.reward_mean", self.rewards
        return "loss", "loss", self.losses

    def eta_s(self) -> float | None:
        recent = [look_up(record, "wall_clock_ms") for record in self.records[-ETA_STEPS:]]
        known = [value for value in recent if value is not None]
        if not known:
            return None
        left = max(0, self.total_steps - self.records[-1]["step"])
        return left * sum(known) / len(known) / 1e3


def draw(screen: Screen, *, ascii_only: bool = False) -> RenderableType:
    parts: list[RenderableType] = [_progress(screen)]
    if screen.under_way:
        parts.append(Text(one_line(screen.under_way, SAMPLE_WIDTH), style="dim"))
    name, _, values = screen.curve
    if values:
        line = f"{name} {sparkline(values, ascii_only=ascii_only)} {number(values[0])} -> "
        parts.append(Text(line + number(values[-1]), style="cyan"))
    if screen.evals:
        ends = screen.evals if len(screen.evals) == 1 else [screen.evals[0], screen.evals[-1]]
        parts.append(Text("held out: " + " -> ".join(map(eval_text, ends)), style="green"))
    if screen.records:
        parts.append(_table(screen, ascii_only))
    for sample, style in ((screen.best, "green"), (screen.worst, "red")):
        if sample is not None:
            parts.append(_sample_panel(sample, style))
    return Group(*parts)


def _progress(screen: Screen) -> RenderableType:
    done = screen.records[-1]["step"] if screen.records else 0
    eta = screen.eta_s()
    grid = Table.grid(padding=(0, 1), expand=True)
    for ratio in (0, 0, 1, 0):
        grid.add_column(ratio=ratio or None, no_wrap=True)
    bar = ProgressBar(total=max(1, screen.total_steps), completed=done)
    left = "done" if done >= screen.total_steps else f"ETA {clock(eta)}" if eta else "starting"
    grid.add_row(Text(screen.title, "bold"), f"step {done}/{screen.total_steps}", bar, left)
    return grid


def _table(screen: Screen, ascii_only: bool) -> Table:
    shown = screen.records[-ROWS_SHOWN:]
    _, path, values = screen.curve
    low, high = min(values, default=0.0), max(values, default=0.0)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("step", justify="right")
    table.add_column("", width=6, no_wrap=True)
    columns = columns_for(shown)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for record in shown:
        value = look_up(record, path)
        drawn = "" if value is None else bar(value, low, high, 6, ascii_only=ascii_only)
        cells = [_cell(record, column) for column in columns]
        table.add_row(str(record["step"]), Text(drawn, "cyan"), *cells)
    return table


def _cell(record: Record, column: Column) -> str:
    value = look_up(record, column.path)
    return "-" if value is None else column.write(value)


def _sample_panel(sample: Record, style: str) -> Panel:
    lines = sample_lines(sample)
    return Panel(
        Text("\n".join(lines)),
        title=f"{sample['pick']} of step {sample['step']}, reward {_reward(sample)}",
        title_align="left",
        border_style=style,
        height=max(SAMPLE_LINES, len(lines)) + 2,
    )


def sample_lines(sample: Record) -> list[str]:
    """Question and answer on few lines, with the middle of long ones left out; a conversation has a
    line per turn."""
    question = one_line(sample.get("question", sample["prompt"]), SAMPLE_WIDTH)
    if turns := sample.get("turns"):
        said = [one_line(f"{role}: {text}", SAMPLE_WIDTH) for role, text in turns]
        if len(said) > MAX_TURNS:
            said = [*said[: MAX_TURNS - 2], f"... {len(said) - MAX_TURNS + 1} more", said[-1]]
        return [question, *said]
    answer = one_line(transcript_of(sample), SAMPLE_WIDTH * (SAMPLE_LINES - 1))
    pieces = [answer[i : i + SAMPLE_WIDTH] for i in range(0, len(answer), SAMPLE_WIDTH)]
    return [question, *pieces]


def _reward(sample: Record) -> str:
    reward = sample["reward"]
    parts = ", ".join(f"{k} {number(v)}" for k, v in sample["reward_parts"].items())
    return ("none" if reward is None else number(reward)) + (f" ({parts})" if parts else "")


def eval_text(record: Record) -> str:
    """`accuracy 0.412 +- 0.060 (version 0)`."""
    accuracy, interval = record.get("accuracy"), record.get("accuracy_ci95")
    if "loss" in record:
        text = f"loss {number(record['loss'])}"
    elif accuracy is None:
        text = f"reward {number(record['reward_mean'])}"
    else:
        text = f"accuracy {accuracy:.3f}" + (f" +- {interval:.3f}" if interval else "")
    return f"{text} (version {record['version']})"


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """The curve as one line of characters: means over equal intervals."""
    width = min(SPARK_WIDTH, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * scale)] for mean in means)


def bar(value: float, low: float, high: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar that is empty at the lowest value of the run and full at the highest."""
    share = (value - low) / (high - low) if high > low else 0.0
    return ("#" if ascii_only else chr(0x2588)) * round(max(0.0, min(1.0, share)) * width)


def clock(value_s: float | None) -> str:
    """3:05, 1:02:03, 2d 3h."""
    if value_s is None:
        return "-"
    total = round(value_s)
    if total >= 86400:
        return f"{total // 86400}d {total % 86400 // 3600}h"
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02d}:{total % 60:02d}" if hours else f"{minutes}:{total % 60:02d}"


class LiveScreen(Screen):
    """A live table. Other output of the program appears above it."""

    def __init__(self, title: str, total_steps: int, console: Console) -> None:
        super().__init__(title, total_steps)
        self.console = console
        self.live = Live(self._draw(), console=console, refresh_per_second=4, transient=False)
        self.live.start()

    def close(self) -> None:
        super().close()
        self.live.refresh()
        self.live.stop()

    def refresh(self) -> None:
        self.live.update(self._draw())

    def _draw(self) -> RenderableType:
        return draw(self, ascii_only=self.console.options.ascii_only)


class PlainScreen(Screen):
    """One line per step, for files and pipes."""

    def __init__(self, title: str, total_steps: int, stream: TextIO) -> None:
        super().__init__(title, total_steps)
        self.stream = stream
        self.columns: list[Column] = []
        self.lines = 0
        self.early: list[Record] = []
        """Evaluations of weights whose step is not recorded yet."""
        self._say(f"{title}: {total_steps} steps")

    def step(self, record: Record) -> None:
        width = max(5, len(str(self.total_steps)))
        columns = columns_for([record])
        if self.lines % HEADER_EVERY == 0 or columns != self.columns:
            self.columns = columns
            titles = " ".join(column.title.rjust(column.width) for column in columns)
            self._say(f"{'step':>{width}} {titles} {'ETA':>7}")
        super().step(record)
        self.lines += 1
        cells = " ".join(_cell(record, column).rjust(column.width) for column in columns)
        self._say(f"{record['step']:>{width}} {cells} {clock(self.eta_s()):>7}")
        self._say_evaluations(record["step"])

    def evaluation(self, record: Record) -> None:
        """Prints the evaluation after the line of the step that produced its weights."""
        super().evaluation(record)
        self.early.append(record)
        self._say_evaluations(self.records[-1]["step"] if self.records else 0)

    def _say_evaluations(self, step: float) -> None:
        due = [record for record in self.early if record["version"] <= step]
        self.early = [record for record in self.early if record["version"] > step]
        for record in due:
            self._say(f"held out: {eval_text(record)}")

    def close(self) -> None:
        self._say_evaluations(math.inf)
        for sample in (self.best, self.worst):
            if sample is not None:
                self._say(f"{sample['pick']} of step {sample['step']}, reward {_reward(sample)}:")
                for line in sample_lines(sample):
                    self._say(f"    {line}")

    def _say(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


def open_screen(title: str, total_steps: int, stream: TextIO | None = None) -> Screen:
    """A live table if the stream (standard output by default) is a terminal, else plain lines."""
    stream = sys.stdout if stream is None else stream
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveScreen(title, total_steps, console)
    return PlainScreen(title, total_steps, stream)
