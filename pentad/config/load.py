"""Loads the config of a run from YAML and overrides, reports all mistakes at once, and writes YAML.

The next step is `planner.prepare`: it resolves unset keys and checks the rules between keys.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pentad.config.aliases import normalise
from pentad.config.describe import (
    choices,
    fields,
    join_or,
    nearest_keys,
    section_of,
    show,
    takes,
    text_keys,
    without_numbers,
)
from pentad.config.other_systems import (
    HALF,
    READ,
    by_last_word,
    hint,
    is_block,
    lora_answer,
)
from pentad.config.recipe_file import COMMAND_LINE, Keys, Tree, drop, dump_yaml, names_of, read_tree
from pentad.config.resolve import path_keys
from pentad.config.schema import Config, RecipeConfig
from pentad.core.errors import Problem, UserError
from pentad.core.hub import name_in_cache
from pentad.core.section import MAX_FLOAT, MAX_INT
from pentad.rl.facts import ELSEWHERE

MAIN_KEYS = ("path", "fn", "name", "rank")
"""Keys that are meant where a block is given as one value, such as `algorithm=ppo`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A config, and the problems found while reading it."""

    config: Config
    """The config, with defaults in place of unusable values."""
    problems: list[Problem]
    bad: frozenset[str]
    """Keys with a wrong or missing value."""
    is_read: bool = True
    """False if the recipe file could not be read: it may set any key."""
    notes: tuple[str, ...] = ()
    """One for each key that was read as another key."""
    written: dict[str, str] = field(default_factory=dict)
    """`key = value` -> the alias that was written for it."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The config as written; unset keys stay unset. Raises UserError with every problem found."""
    reading = read_config(path, overrides)
    if reading.problems:
        raise UserError(reading.problems)
    return reading.config


def read_config(
    path: str | Path | None, overrides: Sequence[str] = (), *, samples: bool = True
) -> Reading:
    """Reads a config and collects all problems. `samples`: whether the command samples."""
    tree = read_tree(path, overrides, RecipeConfig().model_dump(mode="json"), text_keys())
    notes = [*_move(tree), *normalise(_readable(tree), tree, samples=samples)]
    config = Config.model_validate(tree.values)
    bad = frozenset(tree.bad)
    return Reading(config, tree.problems, bad, tree.is_read, tuple(notes), tree.written)


def _readable(tree: Tree) -> RecipeConfig:
    """Validates the tree; unusable values are removed from it and reported."""
    while True:
        try:
            return RecipeConfig.model_validate(tree.values)
        except ValidationError as error:
            _take_out(error, tree)


def dump_config(config: Config) -> str:
    """YAML with every key; `load_config` reads it back to an equal config."""
    return dump_yaml(record_values(config))


def record_values(config: Config) -> dict[str, Any]:
    """Values of all keys for records. Paths in the Hub's cache are replaced by name and commit,
    which are valid on any machine."""
    return with_hub_names(config.model_dump(mode="json"))


def with_hub_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config with Hub names in place of paths in the Hub's cache."""
    named = copy.deepcopy(dict(values))
    for key in path_keys(len(named.get("rollout", {}).get("workflows", ()))):
        block, _, name = key.rpartition(".")
        inner: Any = named
        for part in filter(None, block.split(".")):
            if isinstance(inner, list):
                inner = inner[int(part)]
            else:
                inner = inner.get(part) if isinstance(inner, dict) else None
        path = inner.get(name) if isinstance(inner, dict) else None
        found = name_in_cache(path) if isinstance(path, str) else None
        if found is not None:
            inner[name] = str(found)
    return named


def _move(tree: Tree) -> Iterator[str]:
    """Moves values of the blocks `model` and `training` to their keys in Pentad and yields a note
    on each."""
    for there, here in READ.items():
        block, name = there.split(".")
        values = tree.values.get(block)
        if not (isinstance(values, dict) and name in values):
            continue
        value, place = values.pop(name), tree.values
        if not values:
            del tree.values[block]
        *outer, last = here.split(".")
        for key in outer:
            inner = place.get(key)
            place = inner if isinstance(inner, dict) else place.setdefault(key, {})
        if last in place:
            if _is_override(here, tree) and not _is_override(there, tree):
                where = _where(there, value, tree)
                yield f"{where}: not read, {here} is {show(place[last])} on the command line"
                continue
            rule = f"sets {here}, which is {show(place[last])}"
            tree.problems.append(Problem(_where(there, value, tree), rule, "keep one of the two"))
            continue
        place[last] = value
        tree.sources[here] = tree.sources.get(there, "")
        yield f"{there} = {show(value)}: read as {here}"


def _is_override(key: str, tree: Tree) -> bool:
    """Whether a key was given on the command line, directly or with its block."""
    parts = key.split(".")
    names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(tree.sources.get(name) == COMMAND_LINE for name in names)


def _take_out(error: ValidationError, tree: Tree) -> None:
    """Reports validation errors as problems, and removes the invalid values from the tree."""
    written = copy.deepcopy(tree.values)
    done: set[str] = set()
    items = error.errors(include_url=False)
    # Unknown keys first: a misspelt key explains why another one is missing.
    for item in sorted(items, key=lambda item: item["type"] != "extra_forbidden"):
        keys = _keys(item["loc"])
        key = ".".join(map(str, keys))
        if key in done:  # a value of a union type fails once per alternative
            continue
        done.add(key)
        held = names_of(keys)  # a list is left out as a whole
        if item["type"] == "extra_forbidden":
            drop(tree.values, held)
            tree.problems += _unknown_keys(key, item["input"], tree)
        elif item["type"] == "missing" and len(item["loc"]) == len(keys):
            drop(tree.values, held if held != keys else keys[:-1])
            if key not in tree.bad:
                rule = f"is needed wherever {key.rpartition('.')[0]} is given"
                known = fields()[without_numbers(key)]
                tree.problems.append(Problem(key, rule, f"give {takes(known)}"))
        else:
            drop(tree.values, held)
            value: Any = written
            tree.problems.append(_wrong_value(key, reduce(getitem, keys, value), tree))
        tree.bad.add(".".join(map(str, held)))


def _keys(loc: Keys) -> Keys:
    """The key of a validation error: its location up to the field, without indices of plain lists
    and without union members."""
    keys: list[str | int] = []
    for part in loc:
        keys.append(part)
        field = fields().get(".".join(key for key in keys if isinstance(key, str)))
        if field is None or section_of(field.annotation) is None:
            break
    return tuple(keys)


def _where(key: str, value: object, tree: Tree) -> str:
    source = tree.sources.get(key)
    return f"{key} = {show(value)}" + (f" ({source})" if source else "")


def _unknown_keys(key: str, value: object, tree: Tree) -> list[Problem]:
    """The problems of an unknown key. If it is a block of another system, or contains a key of one,
    each key in it is looked up."""
    if not (isinstance(value, dict) and value and (is_block(key) or _has_known_words(key, value))):
        return [_unknown_key(key, value, tree)]
    return [
        problem
        for name, inner in value.items()
        for problem in _unknown_keys(f"{key}.{name}", inner, tree)
    ]


def _has_known_words(key: str, value: dict[str, object]) -> bool:
    known = {name.rpartition(".")[2] for name in fields()}
    return any(name not in known and by_last_word(f"{key}.{name}") for name in value)


def meant_keys(key: str) -> list[str]:
    """Suggestions for an unknown key. A similar name counts as misspelt or as in the wrong block;
    other names are looked up by their last word."""
    near, word, here = nearest_keys(key), key.rpartition(".")[2], by_last_word(key)
    names = [name.rpartition(".")[2] for name in near]
    is_slip = difflib.get_close_matches(word, names, cutoff=0.75)
    if here not in fields():
        return near
    if word in names:  # the same name in another block
        return [near[0], here]
    return near if is_slip else [here]


def _unknown_key(key: str, value: object, tree: Tree) -> Problem:
    where = _where(key, value, tree)
    if refused := lora_answer(key, where):
        return refused
    if remedy := hint(key):
        return Problem(where, "there is no such key", remedy)
    near = meant_keys(key)
    tree.bad.update(name for name in near if name not in tree.sources)
    if near:
        return Problem(where, "there is no such key", f"did you mean {join_or(near)}?")
    block, _, _ = without_numbers(key).rpartition(".")
    inside = [k for k in fields() if k.rpartition(".")[0] == block]
    names = ", ".join(k.rpartition(".")[2] for k in inside)
    remedy = (
        f"the keys of {block} are {names}"
        if block and names
        else "docs/configuration.md has all keys"
    )
    return Problem(where, "there is no such key", remedy)


def _wrong_value(key: str, value: object, tree: Tree) -> Problem:
    field = fields().get(without_numbers(key))
    if field is None:  # in a block with free names
        return Problem(_where(key, value, tree), "must be true, false, a number or text")
    is_block = takes(field).startswith("a block")
    if is_block and (block := section_of(field.annotation)) and not isinstance(value, dict | list):
        main = next((name for name in MAIN_KEYS if name in block.model_fields), None)
        remedy = f"did you mean {key}.{main} = {show(value)}?" if main and value is not None else ""
        remedy = remedy or f"its keys are {', '.join(block.model_fields)}"
        return Problem(_where(key, value, tree), f"must be {takes(field)}", remedy)
    near = difflib.get_close_matches(str(value), choices(field), cutoff=0.5)
    near.sort(key=lambda one: sorted(one) != sorted(str(value)))  # letters in another order first
    remedy = f"did you mean {near[0]}?" if near else ""
    expected = takes(field)
    if key == "algorithm.name" and (why := ELSEWHERE.get(str(value).lower())):
        return Problem(_where(key, value, tree), why, f"use one of {expected}")
    if value in HALF and "bfloat16" in expected:
        rule = "fp16 overflows without loss scaling, which is not supported"
        return Problem(_where(key, value, tree), rule, f"use bfloat16; it must be {expected}")
    if isinstance(value, int) and value >= MAX_INT:
        remedy = "numbers have at most 63 bits"
    elif isinstance(value, float) and MAX_FLOAT < abs(value) < math.inf:
        remedy = f"numbers are at most {MAX_FLOAT:g}, as in float32"
    elif re.match(r"a list(?! of \d)", expected) and isinstance(value, str | int):
        remedy = f"write [{show(value)}]"
    elif expected.startswith("text") and isinstance(value, bool | dict | list):
        remedy = f'put quotes around it if it is meant as text: "{show(value)}"'
    return Problem(_where(key, value, tree), f"must be {expected}", remedy)
