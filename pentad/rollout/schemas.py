"""JSON schemas of Python functions for chat templates, from name, docstring and types.

Uses the standard library only, because it runs in the processes of environments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, getdoc, signature
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

JSON_TYPES: dict[Any, str] = {
    **{int: "integer", float: "number", str: "string", bool: "boolean"},
    **{list: "array", tuple: "array", dict: "object", NoneType: "null"},
}
SECTIONS = re.compile(r"^(Args|Returns|Raises):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*", re.MULTILINE)


def schema_of(
    tool: Callable[..., Any], name: str | None = None, *, strict: bool = False
) -> dict[str, Any]:
    """Returns the schema of a function: name, docstring and parameters, with the JSON types of
    annotations. `strict`: ValueError if the docstring or a parameter's type is missing."""
    try:
        hints = get_type_hints(tool)
    except (NameError, TypeError) as error:  # names imported only for type checking
        if strict:
            raise ValueError(f"its types cannot be read ({error})") from error
        hints = {}
    described = sections_of(getdoc(tool) or "")
    if strict and not described[""]:
        raise ValueError("it has no docstring, which describes it to the policy")
    taken = signature(tool).parameters.values()
    named = [p for p in taken if strict or p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    properties = {p.name: _property(p, hints, described["Args"], strict) for p in named}
    function: dict[str, Any] = {
        "name": name or getattr(tool, "__name__", ""),
        "description": described[""],
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": [p.name for p in named if p.default is p.empty],
        },
    }
    if "return" in hints and strict:
        function["return"] = json_type(hints["return"]) or {}
        function["return"] |= {"description": described["Returns"]} if described["Returns"] else {}
    return {"type": "function", "function": function}


def _property(
    parameter: Parameter, hints: Mapping[str, Any], arguments: str, strict: bool
) -> dict[str, Any]:
    if strict and parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        raise ValueError(f"*{parameter.name} has no schema; name its parameters")
    if strict and parameter.name not in hints:
        raise ValueError(f"its parameter {parameter.name} has no type")
    kind = json_type(hints.get(parameter.name, Parameter.empty))
    if strict and not kind:
        shown = hints[parameter.name]
        raise ValueError(f"the type {shown} of its parameter {parameter.name} is none of JSON")
    text = arguments_of(arguments).get(parameter.name)
    return {**(kind or {}), **({"description": text} if text else {})}


def json_type(hint: Any) -> dict[str, Any] | None:
    """Returns the schema of an annotation; None if JSON has no such type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is None:
        return {"type": JSON_TYPES[hint]} if hint in JSON_TYPES else None
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin is Literal:
        kinds = list(dict.fromkeys(JSON_TYPES[type(value)] for value in arguments))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(arguments)}
    if origin is list and (items := json_type(arguments[0])) is not None:
        return {"type": "array", "items": items}
    if origin is tuple and ... not in arguments:
        parts = _all(map(json_type, arguments))
        return None if parts is None else {"type": "array", "prefixItems": parts}
    if origin is dict and (values := json_type(arguments[1])) is not None:
        return {"type": "object", "additionalProperties": values}
    return None


def _union(arguments: tuple[Any, ...]) -> dict[str, Any] | None:
    kinds = _all(json_type(one) for one in arguments if one is not NoneType)
    if kinds is None:
        return None
    if len(kinds) == 1:
        found = kinds[0]
    elif all(isinstance(kind.get("type"), str) for kind in kinds):
        found = {"type": sorted(kind["type"] for kind in kinds)}
    else:
        found = {"anyOf": kinds}
    return found | ({"nullable": True} if NoneType in arguments else {})


def _all(found: Iterable[dict[str, Any] | None]) -> list[dict[str, Any]] | None:
    kinds = list(found)
    return None if any(kind is None for kind in kinds) else [kind for kind in kinds if kind]


def sections_of(doc: str) -> dict[str, str]:
    """Splits a Google-style docstring: the text before the sections under "", then each section."""
    before, *rest = SECTIONS.split(doc)
    return {"": before.strip(), "Args": "", "Returns": ""} | {
        name: text.strip("\n").rstrip() if name == "Args" else text.strip()
        for name, text in zip(rest[::2], rest[1::2], strict=True)
    }


def arguments_of(section: str) -> dict[str, str]:
    """Parses the section Args: name -> description on one line."""
    indents = [len(line) - len(line.lstrip()) for line in section.splitlines() if line.strip()]
    if not indents:
        return {}
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        begins = ARGUMENT.match(line) if len(line) - len(line.lstrip()) == min(indents) else None
        if begins:
            name = begins.group(1)
            line = line[begins.end() :]
        if name and line.strip():
            found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found
