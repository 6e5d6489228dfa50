"""The command `pentad convert`: a progress bar around a conversion, and a line about its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pentad.core.errors import Problem, UserError
from pentad.models.conversion import Conversion, Converted, convert
from pentad.models.conversion_files import Progress as Report
from pentad.weights.megatron.folders import RELEASE, Kind, checkpoint_name, find_weights

FORMATS: dict[str, Kind] = {
    "hf": "hf",
    "megatron": "torch_dist",
    "torch_dist": "torch_dist",
    "legacy": "legacy",
}


def run_convert(
    source: str,
    target: str,
    *,
    to: str | None,
    iteration: int | None,
    release: bool,
    processes: int,
    force: bool,
    spec: str,
    **settings: Any,
) -> None:
    """Converts and says what became of it."""
    if iteration is not None and release:
        rule = "each names a checkpoint, and one is converted"
        raise UserError(Problem(f"--iteration {iteration} --release", rule, "keep one of the two"))
    if processes < 1:
        raise UserError(Problem(f"--processes {processes}", "must be at least 1"))
    if spec not in ("te", "local"):
        raise UserError(Problem(f"--spec {spec}", "no such layer spec", "use te or local"))
    name = RELEASE if release else checkpoint_name(iteration) if iteration is not None else None
    _, kind = find_weights(Path(source), name)
    target_kind = _target_format(to, kind)
    if kind == target_kind == "hf" and name is not None:
        where = "--release" if release else f"--iteration {iteration}"
        rule = f"names a checkpoint of Megatron, and {source} and {target} are HF folders"
        raise UserError(Problem(where, rule, "leave it out"))
    conversion = Conversion(
        source=source,
        target=target,
        to=target_kind,
        checkpoint=name,
        iteration=iteration,
        spec="local" if spec == "local" else "te",
        **settings,
    )
    console = Console(stderr=True)
    with progress_bar(console) as report:
        ended = convert(conversion, processes=processes, force=force, progress=report)
    out = Console(highlight=False, markup=False, soft_wrap=True)
    out.print(_last_line(ended))
    if ended.command_line:
        out.print(f"Megatron needs, besides --use-checkpoint-args: {ended.command_line}")


def _target_format(to: str | None, source: Kind) -> Kind:
    """Without a word HF becomes torch_dist, and Megatron becomes HF."""
    if to is None:
        return "torch_dist" if source == "hf" else "hf"
    if to not in FORMATS:
        raise UserError(Problem(f"--to {to}", "no such format", f"use one of {', '.join(FORMATS)}"))
    return FORMATS[to]


def _last_line(ended: Converted) -> str:
    size = f"{ended.num_files} files, {ended.size_bytes / 1e9:.2f} GB"
    if ended.status == "found":
        return f"{ended.folder}: already there ({size}, {ended.identity}); nothing was done"
    return f"{ended.folder}: written ({size}, {ended.identity}) in {ended.seconds:.1f} s"


@contextmanager
def progress_bar(console: Console) -> Iterator[Report]:
    """A bar that follows the reports of a conversion."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as bar:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield report
