"""Functions and classes named by a string: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
MAX_NAMED = 8
"""Maximum number of function names in an error."""
MAX_SOURCE = 120
"""Maximum characters of a source line in an error."""
LOADERS = (f"{Path(__file__).parents[1]}/", f"{Path(importlib.__file__).parent}/", "<frozen ")
"""Path prefixes of stack frames of the import itself, which are never the cause of a failure."""
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def load(spec: str) -> Callable[..., Any]:
    """Imports the named object. Exceptions of the import are passed on."""
    where, _, name = spec.rpartition(":")
    found: Any = import_named(where)
    for part in name.split("."):
        if not hasattr(found, part):
            shown = Path(where).name if where.endswith(".py") else where
            raise AttributeError(f"{shown} has no attribute {part!r}{_defined(found)}")
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{spec} is not a function")
    return found


def _defined(module: object) -> str:
    """Text in brackets with the functions and classes that a module defines."""
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == getattr(module, "__name__", "")
    ]
    return f" (it defines {', '.join(own[:MAX_NAMED])})" if own else ""


def why_not_loaded(failure: BaseException) -> str:
    """Describes an import error with the responsible line of the user's file: `NameError: name 'x'
    is not defined (reward.py, line 7: x + 1)`."""
    if isinstance(failure, SyntaxError):
        said, file, number, line = failure.msg, failure.filename, failure.lineno, failure.text
    else:
        frames = traceback.extract_tb(failure.__traceback__)
        causes = [frame for frame in frames if not frame.filename.startswith(LOADERS)]
        own = [frame for frame in causes if not frame.filename.startswith(LIBRARIES)] or causes
        said, file, number, line = str(failure), None, None, None
        if own:
            file, number, line = own[-1].filename, own[-1].lineno, own[-1].line
    text = f"{type(failure).__name__}: {said}"
    if file is None or number is None:
        return text
    source = f": {line.strip()[:MAX_SOURCE]}" if line and line.strip() else ""
    return f"{text} ({Path(file).name}, line {number}{source})"


def settled(value: Any) -> Any:
    """The result of a call; a coroutine is awaited."""
    if not inspect.isawaitable(value):
        return value
    import asyncio  # here, since plans do not need it

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def absolute(spec: str) -> str:
    """The name with an absolute path, valid in any working folder."""
    where, _, name = spec.rpartition(":")
    return f"{Path(where).resolve()}:{name}" if where.endswith(".py") else spec


def shown(spec: str) -> str:
    """The name for display: a file below the working folder is shown relative to it."""
    where, _, name = spec.rpartition(":")
    here = Path.cwd()
    is_below = where.endswith(".py") and Path(where).is_relative_to(here)
    return f"{Path(where).relative_to(here)}:{name}" if is_below else spec


def import_named(where: str, *, fresh: bool = False) -> ModuleType:
    """Imports `package.module` or `path/to/file.py`. Exceptions of the import are passed on.

    The file can import files beside it, unless another module has their name. `fresh` runs a file
    again if it was imported before.
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
    """The arguments in `given` that a function accepts."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: given[name] for name in given if takes_any or name in parameters}


def describe(spec: str) -> dict[str, Any]:
    """The parameters of a function: required, optional, and whether it accepts any."""
    parameters = inspect.signature(load(spec)).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "required": [p.name for p in named if p.default is p.empty]
        + [f"{p.name} (positional only)" for p in parameters if p.kind is p.POSITIONAL_ONLY],
        "optional": [p.name for p in named if p.default is not p.empty],
        "takes_any": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }
