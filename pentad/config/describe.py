"""Describes the schema for messages: existing keys, the values of a key, suggestions for a misspelt
key."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from pentad.config.schema import Config, RecipeConfig
from pentad.core.errors import visible
from pentad.core.section import MAX_INT, NULL, Section, bounds_of, leaves


def section_of(annotation: Any) -> type[Section] | None:
    """The class of the block that a field holds, also if it may be null; None if it holds none."""
    for leaf in (annotation, *get_args(annotation)):
        if isinstance(leaf, type) and issubclass(leaf, Section):
            return leaf
    return None


def iter_fields(
    section: type[Section] = RecipeConfig, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, field) of every key, blocks before their keys."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from iter_fields(inner, f"{prefix}{name}.")


@cache
def fields() -> dict[str, FieldInfo]:
    """Every dotted key of a recipe with its field."""
    return dict(iter_fields())


@cache
def text_keys() -> frozenset[str]:
    """Keys whose values are free text, or lists of it."""
    return frozenset(key for key, field in fields().items() if str in leaves(field.annotation))


def takes(field: FieldInfo) -> str:
    """The values of a key, in words. Example: "an integer of at least 1 or null"."""
    null = ["null"] if NULL in field.metadata else []
    return join_or(_alternatives(field.annotation, field.metadata) + null)


def choices(field: FieldInfo) -> list[str]:
    """The allowed words of a key; empty if any text is allowed."""
    return [word for word in leaves(field.annotation) if isinstance(word, str)]


def nearest_keys(key: str, limit: int = 2) -> list[str]:
    """Suggests known keys for an unknown one, likeliest first.

    A similar name in the same block comes first, then the same name in another block (blocks with a
    similar path first), then keys that are similar as a whole.
    """
    block, _, name = without_numbers(key).rpartition(".")
    known = list(fields())
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == block}
    cutoff = 0.5 if len(name) < 4 else 0.65  # a name of two letters with a wrong one must match
    close = difflib.get_close_matches(name, siblings, n=limit, cutoff=cutoff)
    found = [siblings[match] for match in close]
    if close and difflib.SequenceMatcher(None, name, close[0]).ratio() >= 0.75:
        return found
    same = [k for k in known if k.rpartition(".")[2] == name]
    same.sort(key=lambda k: -difflib.SequenceMatcher(None, key, k).ratio())
    found = same + found + difflib.get_close_matches(key, known, n=limit, cutoff=0.8)
    return [k for k in dict.fromkeys(found) if not key.startswith(f"{k}.")][:limit]


def show(value: object) -> str:
    """A value as in YAML, on one line and shortened."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {show(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(show(inner) for inner in value) + "]"
    elif isinstance(value, float):
        text = str(value).removesuffix(".0")
    else:
        text = visible(str(value)) or '""'
    return text if len(text) <= 60 else text[:57] + "..."


def value_at(config: Config, key: str) -> Any:
    """The value of a dotted key; None where a block above it is unset."""
    value: Any = config
    for name in key.split("."):
        if value is not None:
            value = value[int(name)] if name.isdecimal() else getattr(value, name)
    return value


def without_numbers(key: str) -> str:
    """The key of the schema: `rollout.workflows.0.weight` is `rollout.workflows.weight` there."""
    return ".".join(name for name in key.split(".") if not name.isdecimal())


def join_or(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _alternatives(annotation: Any, metadata: list[Any]) -> list[str]:
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        return _alternatives(inner, metadata + notes)
    if get_origin(annotation) in (Union, UnionType):
        return [word for arg in get_args(annotation) for word in _alternatives(arg, metadata)]
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    if get_origin(annotation) is tuple:
        return [_list_words(get_args(annotation))]
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return ["a block of keys"]
    if annotation is bool:
        return ["true", "false"]
    names = {int: "an integer", float: "a number", str: "text", NoneType: "null"}
    return [names[annotation] + (_bounds(metadata) if annotation in (int, float) else "")]


def _list_words(args: tuple[Any, ...]) -> str:
    (one,) = _alternatives(args[0], [])
    many = one.replace("an integer", "integers").replace("text", "texts")
    many = many.replace("a number", "numbers").replace("a block", "blocks")
    return f"a list of {many}" if args[-1] is Ellipsis else f"a list of {len(args)} {many}"


def _bounds(metadata: list[Any]) -> str:
    words = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}
    given = bounds_of(metadata)
    said = [f"{words[name]} {limit:g}" for name, limit in given.items() if limit != MAX_INT]
    return " " + " and ".join(said) if said else ""
