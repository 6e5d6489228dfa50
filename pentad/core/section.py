"""The base class of blocks of keys: a frozen pydantic model whose fields are documented by the
texts under them.

Every package has its blocks in `section.py`, beside the code that reads them; `config.schema`
composes them. The class that a recipe fills is the class that the code reads.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from pentad.core.errors import RunError

T = TypeVar("T")

MAX_INT = 2**63
"""Integers are below it: larger ones fit no tensor, file or clock."""
MAX_FLOAT = 3.4e38
"""Numbers are at most this: larger ones are none in float32."""
SHORT_NAMES = {
    "I1F1B": "Interleaved1F1B",
    "IZB": "InterleavedZeroBubble",
    "ZBV": "ZBVZeroBubble",
    "fp32": "float32",
    "bf16": "bfloat16",
}


def long_name(value: object) -> object:
    return SHORT_NAMES.get(value, value) if isinstance(value, str) else value


ShortNames = BeforeValidator(long_name)
"""Lets a key also accept the names of `SHORT_NAMES`."""
Count = Annotated[int, Field(ge=1, lt=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=MAX_INT)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
DType = Literal["float32", "bfloat16", "float64"]
NULL = "null"
"""Mark of a key for which a recipe may have null, and whose value is never null in the section."""
OrDefault = Annotated[T, NULL]
"""Type of a key with the mark; the section replaces null by the default."""


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

    @model_validator(mode="before")
    @classmethod
    def refuse_other_numbers(cls, values: Any) -> Any:
        """Rejects true as the number 1, and numbers beyond float32, like any other word."""
        if not isinstance(values, dict):
            return values
        return {key: _as_word(cls.model_fields.get(key), value) for key, value in values.items()}


def _as_word(field: FieldInfo | None, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_word(field, one) if isinstance(one, float) else one for one in value]
    if field is None or not isinstance(value, bool | int | float):
        return value
    types = leaves(field.annotation)
    if isinstance(value, bool):
        return value if bool in types or str in types else str(value).lower()
    is_large = float in types and str not in types and not abs(value) <= MAX_FLOAT
    return f"larger than {MAX_FLOAT:g}" if is_large else value


def chosen(value: T | None, key: str) -> T:
    """The value of a key that may be null in a recipe, and is never null in a prepared config: it
    was chosen there, or a rule of the command required it."""
    if value is None:
        raise RunError(f"{key} is not set, and the config was not checked for it")
    return value


def leaves(annotation: Any) -> list[Any]:
    """The plain types and literal values in an annotation."""
    args = get_args(annotation)
    return [leaf for arg in args for leaf in leaves(arg)] if args else [annotation]


def bounds_of(metadata: list[Any]) -> dict[Literal["ge", "gt", "le", "lt"], float]:
    """The limits of a number, from the metadata of its field or of its annotation."""
    given = [note.metadata if isinstance(note, FieldInfo) else [note] for note in metadata]
    names: tuple[Literal["ge", "gt", "le", "lt"], ...] = ("ge", "gt", "le", "lt")
    notes = [note for some in given for note in some]
    return {name: getattr(note, name) for name in names for note in notes if hasattr(note, name)}
