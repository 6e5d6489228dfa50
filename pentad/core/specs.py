"""Functions and classes named by a string: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
MAX_NAMED = 8
"""Maximum number of functions of a file in an error."""


def load(spec: str) -> Callable[..., Any]:
    """Imports what the string names. Whatever the import raises is passed on."""
    where, _, name = spec.rpartition(":")
    found: Any = import_named(where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise AttributeError(f"{where} has no attribute {part!r}{_defined(found)}")
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{spec} is not a function")
    return found


def _defined(module: object) -> str:
    """The functions and classes defined in a module, in brackets."""
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == getattr(module, "__name__", "")
    ]
    return f" (it defines {', '.join(own[:MAX_NAMED])})" if own else ""


def settled(value: Any) -> Any:
    """The result of a call; a coroutine is awaited."""
    if not inspect.isawaitable(value):
        return value
    import asyncio  # here, since a plan names functions too and awaits none

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def absolute(spec: str) -> str:
    """The same name, valid in any working folder."""
    where, _, name = spec.rpartition(":")
    return f"{Path(where).resolve()}:{name}" if where.endswith(".py") else spec


def import_named(where: str, *, fresh: bool = False) -> ModuleType:
    """`package.module` or `path/to/file.py`. Whatever the import raises is passed on.

    Files beside a file can be imported too, where no other module has their name. `fresh` runs a
    file again that was imported before.
    """
    if not where.endswith(".py"):
        return importlib.import_module(where)
    file = Path(where).resolve()
    name = f"_pentad_file_{file.stem}_{abs(hash(str(file))):x}"
    if name in sys.modules and not fresh:
        return sys.modules[name]
    origin = importlib.util.spec_from_file_location(name, file)
    if origin is None or origin.loader is None or not file.is_file():
        raise FileNotFoundError(f"no Python file {where}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(origin)
    try:
        origin.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def accepted(function: Callable[..., Any], given: Mapping[str, T]) -> dict[str, T]:
    """The arguments among `given` that a function takes."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: given[name] for name in given if takes_any or name in parameters}


def describe(spec: str) -> dict[str, Any]:
    """The parameters of a function: required ones, optional ones, and whether it takes any."""
    parameters = inspect.signature(load(spec)).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "required": [p.name for p in named if p.default is p.empty]
        + [f"{p.name} (positional only)" for p in parameters if p.kind is p.POSITIONAL_ONLY],
        "optional": [p.name for p in named if p.default is not p.empty],
        "takes_any": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }
