"""A view of a config that records which keys are read through it.

A rule gets such a view: if it reads a key that is known to be wrong, its problems are dropped,
because a second message about the same mistake does not help.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, cast

from pentad.config.schema import Config
from pentad.core.section import Section


def recorded(config: Config) -> tuple[Config, set[str]]:
    """A view of the config, and the dotted keys that have been read through it so far."""
    reads: set[str] = set()
    return cast(Config, _View(config, "", reads)), reads


def reads_any(reads: Collection[str], bad: Collection[str]) -> bool:
    """Whether a key that was read, a block that it is in, or a key in it is a bad one."""
    return any(
        key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
        for key in reads
        for other in bad
    )


class _View:
    """A section whose keys are recorded when they are read, by its own properties too."""

    __slots__ = ("_path", "_reads", "_section")

    def __init__(self, section: Section, path: str, reads: set[str]) -> None:
        self._section, self._path, self._reads = section, path, reads

    def __getattr__(self, name: str) -> Any:
        section = self._section
        if name not in type(section).model_fields:
            return _bound(getattr(type(section), name), self)
        value = getattr(section, name)
        if isinstance(value, Section):
            return _View(value, f"{self._path}{name}.", self._reads)
        self._reads.add(f"{self._path}{name}")
        return value

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in type(self._section).model_fields)

    def __eq__(self, other: object) -> bool:
        self._reads.add(self._path.removesuffix("."))
        return self._section == (other._section if isinstance(other, _View) else other)

    __hash__ = None  # type: ignore[assignment]

    def model_copy(self, *, update: Mapping[str, Any]) -> _View:
        plain = {
            name: value._section if isinstance(value, _View) else value
            for name, value in update.items()
        }
        return _View(self._section.model_copy(update=plain), self._path, self._reads)


def _bound(member: object, view: _View) -> Any:
    """A property or method of a section, that reads through the view."""
    if isinstance(member, property) and member.fget is not None:
        return member.fget(view)
    return partial(cast(Callable[..., Any], member), view)
