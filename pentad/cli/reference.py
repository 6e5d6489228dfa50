"""Writes the generated pages of docs/: the configuration reference, the map, the step records."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from pentad.config.describe import configuration_page
from pentad.telemetry.record import reference as telemetry_page

PACKAGE = Path(__file__).parents[1]
ROWS = (
    "core",
    "telemetry rl",
    "ops weights",
    "models parallel data runtime",
    "config engine infer sync checkpoint",
    "planner samplers rewards serve",
    "rollout",
    "trainer",
    "chaos",
    "cli",
)
"""Packages in the order of their layers, each importing only from lines above its own."""

INTRODUCTION = """\
# Map of the code

One line per module, from its own first sentence. A package imports only from the rows above its
row; `tests/test_house.py` keeps it so. Written by `make docs`.
"""


def map_page() -> str:
    """One line per module, package by package in the order of the layers."""
    blocks = [INTRODUCTION.strip()]
    for number, row in enumerate(ROWS):
        for room in row.split():
            lines = [_line(path) for path in sorted((PACKAGE / room).rglob("*.py"))]
            if any(lines):
                blocks += [f"## {room} (row {number})", "\n".join(filter(None, lines))]
    return "\n\n".join(blocks) + "\n"


def _line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if text is None:
        return ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s", paragraph)[0]
    return f"- `{path.relative_to(PACKAGE).as_posix()}`: {sentence}"


PAGES = {"configuration.md": configuration_page, "map.md": map_page, "telemetry.md": telemetry_page}


def main() -> None:
    """Writes every generated page into the folder given as the only argument."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pentad.cli.reference FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
