"""Consoles of a known width, and tables without trailing spaces, for the output of commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table

MAX_WIDTH = 120
PLAIN_WIDTH = 100


def make_console() -> Console:
    """A console with the width of the terminal up to a limit; without a terminal, plain text of a
    fixed width."""
    if sys.stdout.isatty():
        console = Console(highlight=False)
        return Console(highlight=False, width=min(console.width, MAX_WIDTH))
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) >= 40 else PLAIN_WIDTH
    return Console(highlight=False, width=min(width, MAX_WIDTH), color_system=None)


def make_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    *,
    right: Collection[str] = (),
    no_wrap: bool = False,
    show_header: bool = True,
) -> Table:
    """Creates a table; `right`: the titles of columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=show_header)
    for title in titles:
        justify = "right" if title in right else "left"
        table.add_column(title, justify=justify, no_wrap=no_wrap, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return table


def print_parts(*parts: RenderableType, min_width: int = 0) -> None:
    """Prints without the trailing spaces of tables."""
    console = make_console()
    console.width = max(console.width, min_width)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
