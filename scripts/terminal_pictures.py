"""Draws what a terminal shows as pictures of docs/: `python scripts/terminal_pictures.py RUN`.

RUN is the folder of a finished run, such as runs/logs/USER/demo-grpo/seed1: the live table is drawn
from its records as they were in the middle of it. The plan is that of an example.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from pentad.cli.look import Looked
from pentad.cli.plan import Page, describe_sampler, make_plan
from pentad.planner.prepare import prepare
from pentad.planner.remedies import propose
from pentad.telemetry.screen import Screen, draw
from pentad.telemetry.steps import read_lines

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
SHOWN_SHARE = 0.4
"""Of the steps of the run: where the live table is drawn."""
PLANNED_GIB = 24
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def frame() -> str:
    """The picture of a terminal, without fonts from another host."""
    plain = re.sub(r"@font-face \{\{.*?\}\}\s", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return plain.replace("Fira Code, monospace", FONTS)


def recorder(width: int) -> Console:
    return Console(
        file=io.StringIO(),
        record=True,
        width=width,
        force_terminal=True,
        highlight=False,
        color_system="truecolor",
        legacy_windows=False,
    )


def save(console: Console, name: str, title: str) -> None:
    text = console.export_svg(title=title, code_format=frame(), unique_id=name)
    path = FOLDER / f"terminal-{name}.svg"
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    print(path)


def draw_plan() -> None:
    """A plan that does not fit, without the lines about the disk of this machine."""
    words = ["actor.path=Qwen/Qwen3-8B", "cluster.n_gpus_per_node=8"]
    config, notes = prepare(None, words, "plan", gpu_memory=PLANNED_GIB)
    plan = make_plan(config, notes, PLANNED_GIB)
    console = recorder(92)
    page = Page(plan, Looked(), propose(plan), console)
    page.heading_line()
    page.placement()
    for trainer in plan.trainers:
        page.memory(trainer)
    for sampler in plan.samplers:
        page.say(describe_sampler(sampler))
    page.batch()
    page.verdict()
    save(console, "plan", f"pentad plan {' '.join(words)} --gpu-memory {PLANNED_GIB}")


def draw_table(run: Path) -> None:
    steps = list(read_lines(run / "steps.jsonl"))
    last = steps[round(SHOWN_SHARE * len(steps))]["step"]
    title = f"{run.parent.name}/{run.name}"
    picture = Screen(title, len(steps))
    evals = [line for line in read_lines(run / "evals.jsonl") if line["version"] <= last]
    picture.resume([line for line in steps if line["step"] <= last], evals)
    lines = [line for line in read_lines(run / "samples.jsonl") if line["step"] == last]
    picture.samples(lines)
    console = recorder(82)
    console.print(draw(picture))
    save(console, "live-table", "pentad train recipe.yaml")


def main(run: str) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    draw_plan()
    draw_table(Path(run))


if __name__ == "__main__":
    main(*sys.argv[1:2])
