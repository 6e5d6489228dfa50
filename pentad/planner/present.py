"""Finds, without torch, the datasets of a recipe that are on this machine; a plan reads only
these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pentad.config.describe import value_at
from pentad.config.environments import environments
from pentad.config.resolve import replaced
from pentad.config.rules.inputs import data_path_problem
from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.core.hub import hub_name, name_in_cache
from pentad.data.section import is_made


def is_here(path: str) -> bool:
    """Whether there are rows at the path of a dataset."""
    place = Path(path).expanduser()
    is_pattern = any(character in path for character in "*?[")
    return is_made(path) or place.exists() or (is_pattern and any(place.parent.glob(place.name)))


def absent_data(config: Config) -> Iterator[tuple[str, str]]:
    """Yields key and path of each dataset that is not on this machine."""
    for one in environments(config):
        for key in (one.data_key, one.valid_key):
            path = value_at(config, f"{key}.path")
            if isinstance(path, str) and not is_here(path):
                yield key, path


def absence_problems(config: Config) -> list[Problem | str]:
    """Problems of a run on this machine with missing datasets. Those of the Hub are downloaded, and
    with `only: train` no prompts are read."""
    found = []
    unread = {one.data_key for one in environments(config) if config.only == "train"}
    for key, path in absent_data(config):
        is_open = key in unread or hub_name(path, "dataset") is not None
        problem = None if is_open else data_path_problem(f"{key}.path", path)
        if problem is not None:
            remedy = f"{problem.remedy}; for a run on another machine give --gpu-memory"
            found.append(replace(problem, remedy=remedy))
    return [*found]


def with_data_here(config: Config) -> tuple[Config, list[str]]:
    """The config without datasets that are not on this machine, and a note on each of them."""
    notes, trained = [], {one.data_key for one in environments(config)}
    for key, path in list(absent_data(config)):
        name = name_in_cache(path) or hub_name(path, "dataset")
        rule = "is not on this machine" if name is None else "is not downloaded"
        notes.append(f"{key}.path = {name or path} {rule}")
        config = replaced(config, f"{key}.path" if key in trained else key, None)
    return config, notes


def has_inputs(config: Config) -> bool:
    """Whether data, code or a model folder of the recipe are on this machine."""
    found = environments(config)
    paths = [data.path for one in found for data in (one.data, one.valid) if data is not None]
    codes = [*config.reward.functions, *(fn for one in found for fn in one.reward.functions)]
    codes += [spec for one in found for spec in (one.workflow, one.agent) if spec]
    is_model = config.actor.path is not None and Path(config.actor.path).expanduser().is_dir()
    return is_model or any(paths) or any(":" in code for code in codes)
