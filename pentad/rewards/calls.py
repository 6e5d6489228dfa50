"""Functions that run inside a worker of the pool: rewards (per sample or per group, for one group
or several) and programs that the policy wrote.

Standard library only. An exception of a call is returned as text with its line in the user's file.
Failures that the pool explains (a blocked process, memory, an exit) are not handled here.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pentad.core.seeds import seed_globals
from pentad.core.specs import load, settled

MAX_TEXT = 1000
SeededCall = tuple[int, dict[str, Any]]
"""The seed of a sample, and its arguments."""
EACH, BATCH, SEVERAL = (f"{__name__}:{name}" for name in ("each", "batch", "several"))


def each(spec: str, shared: bytes, own: Sequence[SeededCall]) -> dict[str, Any]:
    """Returns the function's result for each sample. `shared`: a pickled dict of the arguments that
    are equal for all; every call gets a separate copy. Random numbers of a call are seeded by its
    sample; coroutines interleave, so after their first await they use a shared generator."""
    function = load(spec)
    started = time.perf_counter()
    if inspect.iscoroutinefunction(function):
        results = asyncio.run(_together(function, shared, own))
    else:
        results = [
            _tried(function, {**pickle.loads(shared), **arguments}, seed) for seed, arguments in own
        ]
    return {
        "results": results,
        "is_async": inspect.iscoroutinefunction(function),
        "seconds": time.perf_counter() - started,
    }


def several(jobs: Sequence[tuple[str, bytes]]) -> list[Any]:
    """Runs several jobs (functions of this module, with pickled arguments) one after the other."""
    return [load(spec)(**pickle.loads(arguments)) for spec, arguments in jobs]


def batch(spec: str, arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    """Calls the function on all samples together; returns one value per sample."""
    started = time.perf_counter()
    result = _tried(load(spec), arguments, seed)
    if "error" in result:
        return result
    value = result["value"]
    values = value.tolist() if hasattr(value, "tolist") else value
    num = len(arguments["completions"])
    if not isinstance(values, list | tuple):
        return {"error": f"it returned {str(value)[:80]!r} where a list of numbers is required"}
    if len(values) != num:
        return {"error": f"it returned {len(values)} values for {num} completions"}
    return {"values": list(values), "seconds": time.perf_counter() - started}


async def _together(
    function: Callable[..., Any], shared: bytes, own: Sequence[SeededCall]
) -> list[dict[str, Any]]:
    """Runs coroutines concurrently."""

    async def one(seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
        seed_globals(seed)
        try:
            return {"value": await function(**{**pickle.loads(shared), **arguments})}
        except Exception as failure:
            return {"error": _described(failure, function)}

    return await asyncio.gather(*(one(*call) for call in own))


def _tried(function: Callable[..., Any], arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    seed_globals(seed)
    try:
        return {"value": settled(function(**arguments))}
    except Exception as failure:
        return {"error": _described(failure, function)}


def _described(failure: Exception, function: Callable[..., Any]) -> str:
    """Example: `NameError: name 'x' is not defined (rewards.py, line 7)`."""
    is_refused = isinstance(failure, PermissionError) and failure.errno == errno.EPERM
    if is_refused or isinstance(failure, MemoryError):
        raise failure
    frames = traceback.extract_tb(failure.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    text = f"{type(failure).__name__}: {failure}"[:MAX_TEXT]
    place = (own or [frame for frame in frames if frame.filename != __file__])[-1:]
    return text + "".join(f" ({frame.filename}, line {frame.lineno})" for frame in place)


# Programs of the policy, in an isolated worker. Each function runs in the program's process, so
# its result is no verdict: the caller keeps the expected outputs and compares. The only
# exception is `asserts`.


def print_output(source: str, stdin: str) -> None:
    """Runs the program as a script that reads `stdin`; its output is captured outside."""
    Path("stdin").write_text(stdin)  # the working folder is the job's own
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    _execute(source, "__main__")


def call(source: str, function: str, arguments: list[Any]) -> Any:
    """Returns the result of `function`, or `Solution().function`, for the arguments."""
    space = _execute(source, "program")
    owner = space["Solution"]() if function not in space and "Solution" in space else None
    found = space[function] if owner is None else getattr(owner, function)
    return found(*arguments)


def asserts(source: str, tests: list[str]) -> int:
    """Runs the program, then the statements; returns how many hold before the first failure."""
    space = _execute(source, "program")
    for num_passed, test in enumerate(tests):
        try:
            exec(compile(test, "test.py", "exec"), space)
        except Exception:
            return num_passed
    return len(tests)


def _execute(source: str, name: str) -> dict[str, Any]:
    """Runs the source as a module with this name, which classes defined in it look up. The random
    seed is fixed, so equal programs get equal rewards."""
    seed_globals("program")
    module = sys.modules[name] = ModuleType(name)
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module.__dict__
