"""Finds the files of a Hub dataset that hold the rows of a config and a split."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from pentad.core.errors import Problem, UserError
from pentad.core.hub import HubName
from pentad.data.rows import SPLIT, STREAMS, SUFFIXES

CARD = "README.md"
Choices = dict[tuple[str, str], list[str]]
"""(config, split) -> patterns of files."""


def rows_of(name: HubName, choices: Choices, where: str) -> str:
    """The file pattern of the named config and split; UserError unless there is exactly one."""
    config, _, split = name.part.rpartition(":")
    fitting = {
        key: patterns
        for key, patterns in choices.items()
        if split in ("", key[1]) and config in ("", key[0])
    }
    if len(fitting) == 1:
        ((_, patterns),) = fitting.items()
        if len(patterns) == 1:
            return patterns[0].removeprefix("./")
        rule = f"consists of several patterns of files, {', '.join(patterns[:4])}"
        remedy = f"name one of them: {name.repo}:{patterns[0]}"
        raise UserError(Problem(where, rule, remedy))
    names = sorted(f"{name.repo}:{config}:{split}" for config, split in fitting or choices)
    shown = " or ".join(names[:6]) + (f", {len(names)} in all" if names[6:] else "")
    if not names:
        rule = "the hub shows no files of it that can be read (JSON lines, Parquet, Arrow)"
        raise UserError(Problem(where, rule, f"look at them and name them: {name.repo}:FILE"))
    rule = "has several configs and splits" if fitting else "has no such config and split"
    raise UserError(Problem(where, rule, f"give {shown}"))


def declared_rows(card: Path) -> Choices:
    """File patterns by config and split, from the card of a dataset; empty if it declares none."""
    from huggingface_hub.repocard import metadata_load

    try:
        known = (metadata_load(card) or {}) if card.exists() else {}
    except (ValueError, OSError, yaml.YAMLError):  # an invalid card declares nothing
        return {}
    found: Choices = {}
    configs = known.get("configs")
    for entry in configs if isinstance(configs, list) else ():
        files = entry.get("data_files") if isinstance(entry, Mapping) else None
        for split, patterns in _splits(files):
            found[str(entry.get("config_name", "default")), split] = patterns
    return found


def _splits(files: Any) -> Iterator[tuple[str, list[str]]]:
    """Yields (split, patterns) from a card's entry: a pattern, a list of them, or one per split."""
    listed = files if isinstance(files, list) else [] if files is None else [files]
    plain = [one for one in listed if isinstance(one, str)]
    if plain:
        yield "train", plain
    for one in listed:
        if isinstance(one, Mapping) and "path" in one:
            paths = one["path"]
            yield str(one.get("split", "train")), [paths] if isinstance(paths, str) else list(paths)


def found_rows(files: Sequence[str]) -> Choices:
    """Row files by config (folder) and split (in the file name), for dataset cards without a
    declaration."""
    by_place: Choices = {}
    for file in sorted(files):
        path = Path(file)
        if path.suffix not in (*SUFFIXES, *STREAMS) or path.name == CARD or len(path.parts) > 2:
            continue
        split = SPLIT.search(path.stem.lower())
        parent = path.parent.name
        config = "default" if parent in ("", "data") else parent
        by_place.setdefault((config, split[1] if split else "train"), []).append(file)
    return {place: _as_pattern(own, files) for place, own in by_place.items()}


def _as_pattern(own: Sequence[str], files: Sequence[str]) -> list[str]:
    """One pattern that matches exactly these files, else the list of files."""
    if len(own) == 1:
        return list(own)
    pattern = f"{os.path.commonprefix(own)}*{Path(own[0]).suffix}"
    return (
        [pattern] if [f for f in sorted(files) if fnmatch(f, pattern)] == list(own) else list(own)
    )
