"""Random configs drawn from the schema itself, for property tests."""

from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from pentad.config.schema import Config
from pentad.core.section import MAX_FLOAT, NULL, Section, bounds_of

WORDS = st.sampled_from(["x", "on", "1e-6", "0010", "models/q wen", "${seed}", "a: b", "#", "null"])


def values_of(field: FieldInfo) -> st.SearchStrategy:
    values = _values(field.annotation, field.metadata)
    return values | st.none() if NULL in field.metadata else values


def sections(section: type[Section] = Config) -> st.SearchStrategy:
    """Mappings that set some of a block's keys to values the schema takes."""
    fields = section.model_fields.items()
    required = {name: values_of(field) for name, field in fields if field.is_required()}
    optional = {name: values_of(field) for name, field in fields if not field.is_required()}
    return st.fixed_dictionaries(required, optional=optional)


def _values(annotation, metadata) -> st.SearchStrategy:
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        return _values(inner, metadata + notes)
    if get_origin(annotation) in (Union, UnionType):
        return st.one_of(*[_values(arg, metadata) for arg in get_args(annotation)])
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is tuple:
        first, last = get_args(annotation)[0], get_args(annotation)[-1]
        sizes = (0, 3) if last is Ellipsis else (2, 2)
        return st.lists(_values(first, []), min_size=sizes[0], max_size=sizes[1])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return sections(annotation)
    bound = bounds_of(metadata)
    low, high = bound.get("ge", bound.get("gt")), bound.get("le", bound.get("lt"))
    if annotation is float:
        return st.floats(
            -MAX_FLOAT if low is None else low,
            MAX_FLOAT if high is None else high,
            exclude_min="gt" in bound,
            exclude_max="lt" in bound,
            allow_nan=False,
            allow_infinity=False,
        )
    plain = {
        int: st.integers(low, min(high or 10**9, 10**9)),
        str: WORDS,
        bool: st.booleans(),
        NoneType: st.none(),
    }
    return plain[annotation]
