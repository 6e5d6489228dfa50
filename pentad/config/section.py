"""What a block of keys is: an immutable pydantic model whose fields are documented by texts."""

from __future__ import annotations

import ast
import inspect
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A block of keys. Immutable; unknown keys are errors; a text under a field documents it."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        validate_default=True,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Keys that a section inherits from `core.settings` are documented there."""
        for base in filter(is_dataclass, cls.__mro__):
            for name, text in texts_under_fields(base).items():
                cls.model_fields[name].description = text

    @model_validator(mode="before")
    @classmethod
    def refuse_boolean_numbers(cls, values: Any) -> Any:
        """Stops true from passing as the number 1: as a word it fails like any other word."""
        if not isinstance(values, dict):
            return values
        return {key: _as_word(cls.model_fields.get(key), value) for key, value in values.items()}


def _as_word(field: FieldInfo | None, value: Any) -> Any:
    if field is None or not isinstance(value, bool):
        return value
    types = leaves(field.annotation)
    return value if bool in types or str in types else str(value).lower()


def texts_under_fields(cls: type) -> dict[str, str]:
    (found,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(found, ast.ClassDef)
    return {
        line.target.id: inspect.cleandoc(str(under.value.value))
        for line, under in pairwise(found.body)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant)
    }


def leaves(annotation: Any) -> list[Any]:
    """The plain types and literal values an annotation is made of."""
    args = get_args(annotation)
    return [leaf for arg in args for leaf in leaves(arg)] if args else [annotation]
