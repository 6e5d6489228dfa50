"""Converts functions and classes of a Python session to names that a recipe can hold.

A function in a file is named by the file. A function of a notebook or of the running script is
written to a separate file, with the functions, imports and plain values that it uses, so that
reward processes can import it. If one of these cannot be written, the error names it.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from pentad.core.errors import Problem, UserError
from pentad.core.files import write_atomic

HERE = "give in_process=True to run it in this process"


def spec_of(given: Callable[..., Any], folder: Path, what: str) -> str:
    """Returns FILE:NAME or PACKAGE.MODULE:NAME. A session's functions are written to `folder`."""
    name, module = getattr(given, "__qualname__", ""), getattr(given, "__module__", "__main__")
    if not isinstance(given, FunctionType | type) or not name.isidentifier():
        rule = "is not a function or class at the top of a file or cell"
        remedy = f"write it there with def, or {HERE}"
        raise UserError(Problem(f"{what} = {name or repr(given)}", rule, remedy))
    file = getattr(sys.modules.get(module), "__file__", None)
    if module != "__main__" and file is not None:
        return f"{module}:{name}" if "." in module else f"{Path(file).resolve()}:{name}"
    target = folder / f"{name}.py"
    text = "\n\n\n".join(Shipped(given, what).parts()) + "\n"
    if not target.exists() or target.read_text() != text:
        write_atomic(target, text.encode())
    return f"{target.resolve()}:{name}"


class Shipped:
    """The source of a function or class of this session with its dependencies."""

    def __init__(self, given: Any, what: str) -> None:
        self.given = given
        self.where = f"{what} = {given.__name__}"
        self.imports: dict[str, str] = {}
        self.values: dict[str, str] = {}
        self.sources: dict[str, str] = {}

    def parts(self) -> list[str]:
        self._add(self.given)
        heads = [*sorted(self.imports.values()), *self.values.values()]
        return [*(["\n".join(heads)] if heads else []), *self.sources.values()]

    def _add(self, given: Any) -> None:
        if given.__name__ in self.sources:
            return
        if free := getattr(getattr(given, "__code__", None), "co_freevars", ()):
            rule = f"uses {', '.join(free)} of the enclosing function, which cannot be written"
            raise UserError(Problem(self.where, rule, f"make it an argument, or {HERE}"))
        try:
            source = textwrap.dedent(inspect.getsource(given))
        except (OSError, TypeError) as error:
            rule = f"the source of {given.__name__} is not known"
            remedy = f"write it in a file, or {HERE}"
            raise UserError(Problem(self.where, rule, remedy)) from error
        self.sources[given.__name__] = source.rstrip()
        known = getattr(given, "__globals__", None) or vars(sys.modules[given.__module__])
        for name in names_in(source):
            if name in known and known[name] is not given:
                self._use(name, known[name])

    def _use(self, name: str, value: Any) -> None:
        module = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            self.imports[name] = f"import {value.__name__} as {name}"
        elif isinstance(value, FunctionType | type) and module == "__main__":
            self._add(value)
        elif callable(value) and module and "." not in getattr(value, "__qualname__", "."):
            self.imports[name] = f"from {module} import {value.__qualname__} as {name}"
        elif is_plain(value):
            self.values[name] = f"{name} = {value!r}"
        else:
            rule = f"uses {name}, a {type(value).__name__} of this session, which cannot be written"
            raise UserError(Problem(self.where, rule, f"make it in the function, or {HERE}"))


def names_in(source: str) -> Iterator[str]:
    """Yields the names that the source reads, in order of appearance."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


def is_plain(value: object) -> bool:
    """Whether the value can be written as a Python literal."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
