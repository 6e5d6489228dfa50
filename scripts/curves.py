"""Draws the curves of the recipes from their runs: `python scripts/curves.py RUNS`.

RUNS is the folder of `make recipes` (runs). One panel for each recipe: mean reward of a step, and
held-out accuracy. The curves are kept in a file beside the picture, so a recipe that is not in RUNS
keeps its panel. Colours are readable on a light and on a dark page.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from pentad.telemetry.steps import read_lines

TARGET = Path(__file__).parents[1] / "docs" / "pictures" / "curves-recipes.svg"
DATA = TARGET.with_suffix(".json")
NAMES = sorted(path.stem for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml"))
GREY, FRAME, REWARD, ACCURACY = "#7b8794", "#a9b2bd", "#4a72d4", "#c98a1a"
FONT = "font-family='Helvetica, Arial, sans-serif'"
COLUMNS, PANEL_W, PANEL_H = 3, 270, 190
LEFT, TOP, RIGHT, BOTTOM = 34, 30, 10, 24
"""Margins of a panel."""
WINDOW = 5
"""Steps over which a reward is averaged."""


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    rewards: list[tuple[float, float]]
    accuracies: list[tuple[float, float]]

    @property
    def last_step(self) -> float:
        return max(step for step, _ in (*self.rewards, *self.accuracies))


def read_curve(name: str, runs: Path) -> Curve | None:
    """The newest run of a recipe; None if there is none."""
    folders = sorted(runs.glob(f"logs/*/recipe-{name.replace('_', '-')}/*/steps.jsonl"))
    folders += sorted(runs.glob(f"logs/*/recipe-{name}/*/steps.jsonl"))
    if not folders:
        return None
    newest = max(folders, key=lambda path: path.stat().st_mtime)
    steps = list(read_lines(newest))
    rewards = [(line["step"], line["rl"]["reward_mean"]) for line in steps if line["rl"]]
    evals = [
        (line["version"], line["accuracy"]) for line in read_lines(newest.parent / "evals.jsonl")
    ]
    return Curve(name, averaged(rewards), evals)


def averaged(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over the last steps, so that a curve can be told from its noise."""
    found = []
    for number, (step, _) in enumerate(points):
        recent = [value for _, value in points[max(0, number - WINDOW + 1) : number + 1]]
        found.append((step, round(sum(recent) / len(recent), 3)))
    return found


def text(x: float, y: float, words: str, *, size: float = 10.5, anchor: str = "middle") -> str:
    look = f"text-anchor='{anchor}' font-size='{size}' fill='{GREY}' {FONT}"
    return f"<text x='{x:.0f}' y='{y:.0f}' {look}>{escape(words)}</text>"


def panel(curve: Curve, x: int, y: int) -> list[str]:
    wide, high = PANEL_W - LEFT - RIGHT, PANEL_H - TOP - BOTTOM
    end, top = curve.last_step, max(1.0, *(value for _, value in curve.rewards))

    def at(step: float, value: float) -> tuple[float, float]:
        return x + LEFT + wide * step / end, y + TOP + high * (1 - value / top)

    parts = [text(x + LEFT, y + TOP - 10, curve.name, size=13, anchor="start")]
    for value in (0, 0.5, 1.0):
        _, line = at(0, value)
        parts.append(
            f"<line x1='{x + LEFT}' x2='{x + LEFT + wide}' y1='{line:.1f}' y2='{line:.1f}'"
            f" stroke='{FRAME}' stroke-width='0.6' stroke-dasharray='3 4'/>"
        )
        parts.append(text(x + LEFT - 6, line + 4, f"{value:g}", anchor="end"))
    for step in (0, end / 2, end):
        parts.append(text(at(step, 0)[0], y + PANEL_H - 6, f"{step:g}"))
    for points, ink, width in ((curve.rewards, REWARD, 1.6), (curve.accuracies, ACCURACY, 2)):
        places = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in points)
        parts.append(
            f"<polyline points='{places}' fill='none' stroke='{ink}' stroke-width='{width}'/>"
        )
    for point in curve.accuracies:
        left, height = at(*point)
        parts.append(f"<circle cx='{left:.1f}' cy='{height:.1f}' r='3' fill='{ACCURACY}'/>")
    return parts


def legend(width: int) -> list[str]:
    parts = []
    entries = ((REWARD, f"mean reward, over {WINDOW} steps"), (ACCURACY, "held-out accuracy"))
    for number, (ink, words) in enumerate(entries):
        left = width - 430 + 235 * number
        parts.append(f"<rect x='{left}' y='9' width='18' height='4' fill='{ink}'/>")
        parts.append(text(left + 24, 16, words, size=12, anchor="start"))
    return parts


def svg(curves: list[Curve]) -> str:
    rows = -(-len(curves) // COLUMNS)
    width, height = COLUMNS * PANEL_W + 10, rows * PANEL_H + 30
    parts = legend(width)
    for number, curve in enumerate(curves):
        row, column = divmod(number, COLUMNS)
        parts += panel(curve, column * PANEL_W, 24 + row * PANEL_H)
    title = "Reward and held-out accuracy of the recipes, by step"
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}'"
        f" height='{height}' role='img' aria-label='{title}'><title>{title}</title>"
    )
    return "\n".join([head, *parts, "</svg>", ""])


def main(runs: str = "runs") -> None:
    kept = json.loads(DATA.read_text()) if DATA.exists() else {}
    found = {name: read_curve(name, Path(runs)) for name in NAMES}
    run = {name: asdict(curve) for name, curve in found.items() if curve is not None}
    if not run:
        raise SystemExit(f"{runs} has no run of a recipe; make recipes")
    curves = {name: {**kept, **run}[name] for name in NAMES if name in kept or name in run}
    lines = [f"{json.dumps(name)}: {json.dumps(curve)}" for name, curve in curves.items()]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    TARGET.write_text(svg([Curve(**curve) for curve in curves.values()]))
    missing = [name for name in NAMES if name not in curves]
    print(
        f"{TARGET}: {', '.join(run)} drawn from {runs}, {len(curves)} recipes in all"
        + (f"; no run of {', '.join(missing)}" if missing else "")
    )


if __name__ == "__main__":
    main(*sys.argv[1:2])
