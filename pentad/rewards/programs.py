"""Runs programs that the policy wrote, inside an isolated worker. Standard library only.

Every function here shares its process with the program, so nothing it returns is a verdict:
expected outputs stay with the caller, who compares. The one exception is `asserts`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def print_output(source: str, stdin: str) -> None:
    """Runs the program as a script that reads `stdin`; what it prints is captured outside."""
    Path("stdin").write_text(stdin)  # the working folder is the job's own
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    _execute(source, "__main__")


def call(source: str, function: str, arguments: list[Any]) -> Any:
    """What `function`, or `Solution().function`, returns for the arguments."""
    space = _execute(source, "program")
    owner = space["Solution"]() if function not in space and "Solution" in space else None
    found = space[function] if owner is None else getattr(owner, function)
    return found(*arguments)


def asserts(source: str, tests: list[str]) -> int:
    """How many of the statements hold after the program ran, up to the first that does not."""
    space = _execute(source, "program")
    for num_passed, test in enumerate(tests):
        try:
            exec(compile(test, "test.py", "exec"), space)
        except Exception:
            return num_passed
    return len(tests)


def _execute(source: str, name: str) -> dict[str, Any]:
    """Runs the source as the module of that name, which classes defined in it look up."""
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module.__dict__
