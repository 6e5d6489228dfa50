"""Fills the fields of a class from sections of the config, by their names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def into(cls: type[T], *sections: object, **derived: Any) -> T:
    """A `cls` of the derived values and, for its other fields, the values of the sections."""
    for name in [f.name for f in fields(cls) if f.name not in derived]:  # type: ignore[arg-type]
        found = [getattr(section, name) for section in sections if hasattr(section, name)]
        assert len(found) < 2, f"{cls.__name__}.{name} stands in several sections"
        for value in found:
            derived[name] = value
    return cls(**derived)
